"""Ten architectures of different kinds on two real gloo ranks: three steps of AdamW, and the state loads back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import MODELS, Built
from processes import run_ranks
from test_gloo import BOUND, full, perturb, train

import autoshard

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def mixtral() -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, num_local_experts=4,
    )  # fmt: skip
    ids = torch.randint(1, 64, (2, 8))
    return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def clip() -> Built:
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
    config = CLIPConfig(
        text_config={**size, "vocab_size": 64, "eos_token_id": 2},
        vision_config={**size, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    ids = torch.randint(3, 64, (3, 6))
    ids[:, -1] = 2
    given = {"input_ids": ids, "pixel_values": torch.randn(3, 3, 16, 16), "return_loss": True}
    return CLIPModel(config), given


class _Named(torch.nn.Module):
    """A model of another file, with its outputs by name."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: Any) -> dict[str, torch.Tensor]:
        return {"out": self.model(*given.values())}


def _of_ours(module: str, name: str) -> Built:
    import importlib

    from architectures import CASES

    importlib.import_module(module)
    torch.manual_seed(0)
    model, args, _ = CASES[name]()
    return _Named(model), {f"x{i}": x for i, x in enumerate(args)}


BUILDERS = {
    **{name: MODELS[name] for name in ("bert", "gpt2", "llama", "t5", "vit", "resnet")},
    "mixtral": mixtral,
    "clip": clip,
    "unet": lambda: _of_ours("architectures_vision", "unet"),
    "lstm": lambda: _of_ours("architectures_sequence", "recurrent_layers"),
}


def train_all() -> dict[str, tuple[dict[str, float], list[int], float]]:
    """For each: errors of training, firm elements, and what the output is off after the state went out and in."""
    found = {}
    for name, build in BUILDERS.items():
        model, kwargs = build()
        perturb(model)
        sharded = autoshard.autoshard(model, 2, kwargs=kwargs, hardware="ideal")
        worst, counts = train(model, sharded, kwargs, {"foreach": True}, max_norm=0.01)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.9)
        sharded.load_state_dict(other.state_dict())
        saved = {n: full(x) for n, x in sharded.full_state_dict().items()}
        off = max(float((saved[n] - x).abs().max()) for n, x in other.state_dict().items())
        model.load_state_dict(saved)
        found[name] = worst, counts, off
    return found


def test_ten_architectures_on_two_ranks() -> None:
    for rank, found in enumerate(run_ranks(train_all, 2, timeout_s=400.0)):
        assert len(found) == 10
        for name, (worst, (firm, count), off) in found.items():
            assert max(worst.values()) <= BOUND, (rank, name, worst)
            assert firm > 0.5 * count, name
            assert off == 0, name
