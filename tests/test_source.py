"""What SOURCE can name, and what is said of what it cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from autoshard.errors import ConstraintError, OptionsError
from autoshard.source import load_source

FILE = """\
import torch
from torch import nn
import helper
from autoshard.errors import ConstraintError

class Tools:
    @staticmethod
    def build():
        return nn.Linear(2, 2)

def alone(): return nn.Linear(2, 3)
def with_args(): return nn.Linear(2, 3), [torch.ones(1, 2)]
def with_both(): return nn.Linear(2, 3), (), {"input": torch.ones(1, 2)}
def number(): return 3
def nothing(): pass
def bare_input(): return nn.Linear(2, 3), torch.ones(1, 2)
def needs(argument): return argument
def deep(): return helper.fail()
def quits(): raise SystemExit("bye")
def ours(): raise ConstraintError("Ours.")
instance = nn.Linear(4, 4)
constant = 5
"""
HELPER = "def fail():\n    raise KeyError('deep')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    monkeypatch.delitem(sys.modules, "pkg", raising=False)
    Path("m.py").write_text(FILE)
    Path("helper.py").write_text(HELPER)
    Path("syntax.py").write_text("x = 1\ndef f(:\n")
    Path("missing.py").write_text("import no_such_library\n")
    yield tmp_path
    for name in ("helper", "pkg", "syntax"):
        sys.modules.pop(name, None)


def refusal(text: str, **options) -> OptionsError:
    with pytest.raises(OptionsError) as caught:
        load_source(text, **options)
    return caught.value


def test_factories_of_files_and_modules():
    for text in ("m.py:alone", "./m.py:alone", "m.py:Tools.build", "torch.nn:Identity"):
        assert isinstance(load_source(text).model, torch.nn.Module)
    assert len(load_source("m.py:with_args").args) == 1
    assert isinstance(load_source("m.py:with_args").args, tuple)
    assert load_source("m.py:with_both").kwargs.keys() == {"input"}
    model = load_source("m.py:instance").model
    assert isinstance(model, torch.nn.Linear)
    Path("pkg.py").write_text("import torch\ndef build(): return torch.nn.Identity()\n")
    assert isinstance(load_source("pkg:build").model, torch.nn.Identity)


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("m.py", "'m.py' names no model.", ""),
        (":f", "':f' names no model.", ""),
        ("m.py:", "'m.py:' names no model.", ""),
        ("none.py:f", "The model's file does not exist.", "none.py"),
        ("./:f", "The model's file is a folder.", "."),
        ("no.such:f", "There is no module 'no.such'.", ""),
        ("m.py:alon", "There is no 'alon' in m.py.", "m.py"),
        ("m.py:constant", "'m.py:constant' is an int, not a callable", "m.py"),
        ("m.py:number", "'m.py:number' returns an int, not a model.", "m.py"),
        ("m.py:nothing", "'m.py:nothing' returns None, not a model.", "m.py"),
        ("m.py:bare_input", "The example inputs of 'm.py:bare_input' are a Tensor", "m.py"),
        ("m.py:needs", "'m.py:needs' raised an error: TypeError: needs()", "m.py, line 17"),
        ("m.py:deep", "'m.py:deep' raised an error: KeyError: 'deep'", "m.py, line 18, in deep"),
        ("m.py:quits", "'m.py:quits' raised an error: SystemExit: bye", "m.py, line 19"),
        ("syntax.py:f", "syntax.py cannot be imported: SyntaxError", "syntax.py, line 2"),
        ("syntax:f", "The module syntax cannot be imported: SyntaxError", "syntax.py, line 2"),
        ("missing.py:f", "missing.py cannot be imported: ModuleNotFound", "missing.py, line 1"),
    ],
)
def test_what_cannot_be_loaded_is_told_with_the_users_line(text, what, where):
    error = refusal(text)
    assert error.what.startswith(what)
    assert where in error.where
    assert "Traceback" not in str(error)


def test_the_nearest_name_is_proposed():
    assert refusal("m.py:alon").fix == "Did you mean alone?"


def test_errors_of_autoshard_are_passed_on():
    with pytest.raises(ConstraintError, match="Ours"):
        load_source("m.py:ours")


def test_keyboard_interrupts_are_passed_on():
    Path("m.py").write_text("def f(): raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_source("m.py:f")


# ---- transformers ---------------------------------------------------------------------------

SMALL = {
    "llama": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 4, "vocab_size": 64},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64},
    "bert": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 4, "vocab_size": 64},
    "t5": {"d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8,
           "vocab_size": 64, "decoder_start_token_id": 0},
    "vit": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 4, "image_size": 32, "patch_size": 8},
}  # fmt: skip


def config(model_type: str, **more) -> str:
    Path("config.json").write_text(
        json.dumps({"model_type": model_type, **SMALL.get(model_type, {}), **more})
    )
    return "transformers:config.json"


@pytest.mark.parametrize(
    ("model_type", "more", "name", "inputs"),
    [
        ("llama", {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM",
         {"input_ids": (1, 2048), "labels": (1, 2048)}),
        ("llama", {"architectures": ["LlamaForSequenceClassification"], "pad_token_id": 0},
         "LlamaForSequenceClassification", {"input_ids": (1, 2048), "labels": (1,)}),
        ("gpt2", {}, "GPT2LMHeadModel", {"input_ids": (1, 1024), "labels": (1, 1024)}),
        ("bert", {"max_position_embeddings": 514}, "BertForMaskedLM",
         {"input_ids": (1, 512), "labels": (1, 512)}),
        ("t5", {}, "T5ForConditionalGeneration", {"input_ids": (1, 512), "labels": (1, 512)}),
        ("vit", {}, "ViTForImageClassification", {"pixel_values": (1, 3, 32, 32), "labels": (1,)}),
    ],
)  # fmt: skip
def test_transformers_configs(model_type, more, name, inputs):
    source = load_source(config(model_type, **more))
    assert type(source.model).__name__ == name
    assert {key: tuple(value.shape) for key, value in source.kwargs.items()} == inputs
    assert {value.device.type for value in source.kwargs.values()} == {"meta"}
    assert {p.device.type for p in source.model.parameters()} == {"meta"}
    assert torch.get_default_dtype() == torch.float32
    without = load_source(config(model_type, **more), training=False)
    assert "labels" not in without.kwargs
    assert not without.model.training


@pytest.mark.parametrize("model_type", SMALL)
def test_transformers_models_run_on_their_inputs(model_type):
    sizes = "" if model_type == "vit" else "?batch=2&seq=8"
    source = load_source(config(model_type) + sizes, device="cpu")
    assert source.model(**source.kwargs).loss.isfinite()
    again = load_source(config(model_type) + sizes, device="cpu")
    assert all(
        torch.equal(a, b)
        for a, b in zip(source.model.parameters(), again.model.parameters(), strict=True)
    )


def test_the_dtype_of_the_config_is_kept():
    source = load_source(config("llama", dtype="bfloat16") + "?seq=4")
    assert {p.dtype for p in source.model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_a_folder_with_a_config_will_do(tmp_path):
    config("gpt2")
    assert type(load_source(f"transformers:{tmp_path}?seq=4").model).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("?batch=0", "'batch=0' is no size of the example inputs."),
        ("?batch=two", "'batch=two' is no size of the example inputs."),
        ("?layers=2", "'layers=2' is no size of the example inputs."),
        ("?", ""),
        ("?&", "'?&' is not understood."),
    ],
)
def test_sizes_that_are_not_understood(query, what):
    if not what:
        assert load_source(config("gpt2") + query)
        return
    assert refusal(config("gpt2") + query).what.startswith(what)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "The config cannot be read: "),
        ("[]", "The file is no transformers config: it has no 'model_type'."),
        ('{"model_type": "nope"}', "transformers refuses the config: Unrecognized model"),
        ('{"model_type": "llama", "hidden_size": "x"}', "transformers refuses the config: "),
        ('{"model_type": "llama", "hidden_size": 3, "num_attention_heads": 0}', "transformers "),
    ],
)
def test_configs_that_are_refused(content, what):
    Path("config.json").write_text(content)
    error = refusal("transformers:config.json")
    assert error.what.startswith(what)
    assert error.where == "config.json"


def test_models_whose_inputs_are_not_made_here():
    error = refusal(config("wav2vec2", num_hidden_layers=1))
    assert error.what == "Wav2Vec2Model takes 'input_values'."
    assert error.fix.startswith("Write a factory")
    assert "no 'seq'" in refusal(config("vit") + "?seq=4").what
