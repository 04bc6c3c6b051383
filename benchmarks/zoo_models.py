"""A tiny model, with random weights and example inputs, of every architecture of `transformers` and `diffusers`.

The default configuration is shrunk (`zoo_sizes`), inputs are made (`zoo_inputs`), and the model is run once. Where that
fails, it is tried with other sizes: a rule by name cannot know that one model's window must divide its image, and the
model can.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import itertools
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from zoo_inputs import example
from zoo_sizes import shrunk

MOST_PARAMETERS = 16_000_000

TASKS = {
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "speech to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "masked language model": "MODEL_FOR_MASKED_LM",
    "causal language model": "MODEL_FOR_CAUSAL_LM",
    "images to classes": "MODEL_FOR_IMAGE_CLASSIFICATION",
    "audio to classes": "MODEL_FOR_AUDIO_CLASSIFICATION",
    "video to classes": "MODEL_FOR_VIDEO_CLASSIFICATION",
    "segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION",
    "depth": "MODEL_FOR_DEPTH_ESTIMATION",
    "text to classes": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "base": "MODEL",
}
"""What a model is trained for, and the register of `transformers` that has its class; the first that is there is built."""

_COMMON = frozenset(f.name for f in dataclasses.fields(PreTrainedConfig)) - {
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PARTICULARS: dict[str, dict[str, Any]] = {
    r"(qwen2(_5)?_vl|glm4v(_moe)?|glm_(image|ocr)|paddleocr_vl)_text": {"rope_parameters": _ROTARY},
    r"deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    r"esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    r"autoformer|informer|time_series_transformer": {"prediction_length": 8},
    r"ministral|hunyuan_v1_(dense|moe)|hunyuan_vl_text": {"head_dim": 16},
    r"bamba|granitemoehybrid": {"mamba_d_head": 16},
    r"gemma3n_text": {"num_kv_shared_layers": 0},
    r"lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    r"efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 320},
    r"bit": {"hidden_sizes": [32, 32, 32, 32], "embedding_size": 32, "num_groups": 8},
}
"""By a pattern of model types."""
_DEFAULT = 10**9
_OTHERS: tuple[dict[str, int], ...] = (
    {},
    {"key and value heads": 4},
    {"key and value heads": 4, "rotary width": 16},
    {"heads": 8},
    {"heads": 2, "width": 32},
    {"patch": 4},
    {"patch": 4, "chunk": 4},
    {"experts a token": _DEFAULT},
    {"experts": 8, "experts a token": 8},
    {"image": 64},
    {"image": 64, "patch": 4},
    {"width": 128},
    {"head width": 32},
    {"image": _DEFAULT},
    {"layers": 4},
    {"layers": _DEFAULT},
    {"chunk": _DEFAULT},
    {"head width": _DEFAULT},
    {"width": _DEFAULT},
    {"positions": _DEFAULT},
    {"width": _DEFAULT, "heads": _DEFAULT},
    {"width": _DEFAULT, "heads": _DEFAULT, "head width": _DEFAULT, "key and value heads": _DEFAULT},
)
"""Sizes to try, by role, the first that work are taken. Those that are not named are a role's own."""


@dataclass(frozen=True)
class Built:
    """A tiny model that runs on `kwargs`, and the sizes that are not the roles' own."""

    architecture: str
    model: nn.Module
    kwargs: dict[str, Any]
    task: str
    sizes: Mapping[str, int]


class NotBuiltError(Exception):
    """No tiny model of the architecture could be built; says what the last attempts met."""


def architectures() -> list[str]:
    """Every architecture: model types of `transformers`, then `diffusers:` and a class."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return [*sorted(MODEL_MAPPING_NAMES), *(f"diffusers:{name}" for name in _diffusers_classes())]


def build(architecture: str, seed: int = 0) -> Built:
    """The first model that is built and runs.

    Raises:
        NotBuiltError: none did.
    """
    met: dict[str, None] = {}
    for task, sizes in itertools.product(_tasks(architecture), _OTHERS):
        try:
            return _attempt(architecture, task, sizes, seed)
        except Exception as error:  # noqa: BLE001 - whatever a model's own code raises
            met[f"{type(error).__name__}: {error}".splitlines()[0][:120]] = None
    raise NotBuiltError("; ".join(itertools.islice(met, 3)) or "no class")


def _attempt(architecture: str, task: str, sizes: Mapping[str, int], seed: int) -> Built:
    make, config = _maker(architecture, task, sizes)
    with torch.device("meta"), contextlib.suppress(NotImplementedError, RuntimeError):
        size = sum(p.numel() for p in make().parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"{size / 1e6:.0f} million parameters after shrinking")
    torch.manual_seed(seed)
    model = make().eval()
    kwargs = example(model, config if config is not None else model.config, task, seed)
    with torch.no_grad():
        model(**kwargs)
    return Built(architecture, model, kwargs, task, sizes)


def _maker(architecture: str, task: str, sizes: Mapping[str, int]) -> tuple[Any, Any]:
    """What makes the model, and its configuration (None: the model has it)."""
    if architecture.startswith("diffusers:"):
        diffusers = importlib.import_module("diffusers")
        kind = getattr(diffusers, architecture.removeprefix("diffusers:"))
        defaults = {
            n: p.default
            for n, p in inspect.signature(kind.__init__).parameters.items()
            if p.default is not p.empty
        }
        return (lambda: kind(**shrunk(defaults, sizes))), None
    transformers = importlib.import_module("transformers")
    kind = getattr(transformers, _class_name(architecture, task))
    config = _config(architecture, sizes)
    return (lambda: kind(config)), config


def _config(architecture: str, sizes: Mapping[str, int]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[architecture]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = kind.from_dict(shrunk(_given(kind()), sizes))
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _given(config: Any) -> dict[str, Any]:
    """What the configuration is made from, parts included: what follows from it shall follow from the shrunk."""
    tree: dict[str, Any] = {}
    parts = getattr(config, "sub_configs", {})
    for field in dataclasses.fields(config):
        value = vars(config).get(field.name, field.default)
        if field.name in parts and isinstance(value, PreTrainedConfig):
            tree[field.name] = {**_given(value), "model_type": value.model_type}
        elif (
            (field.default is not None or "mrope_section" in str(value))
            and field.name not in _COMMON
            and not callable(value)
        ):
            tree[field.name] = value
    return copy.deepcopy({**tree, **_particular(config.model_type)})


def _particular(model_type: str) -> dict[str, Any]:
    """What a default configuration lacks, and its model needs."""
    return next(
        (made for pattern, made in _PARTICULARS.items() if re.fullmatch(pattern, model_type)), {}
    )


def _tasks(architecture: str) -> list[str]:
    if architecture.startswith("diffusers:"):
        return ["image", "video", "sequence"]
    return [task for task in TASKS if _class_name(architecture, task)][:3]


def _class_name(architecture: str, task: str) -> str:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    names = getattr(auto, f"{TASKS[task]}_MAPPING_NAMES").get(architecture, "")
    return names if isinstance(names, str) else names[0]


def _diffusers_classes() -> list[str]:
    """The models of `diffusers` that can be built by themselves (those made from another model cannot)."""
    diffusers = importlib.import_module("diffusers")
    mixin = importlib.import_module("diffusers.models.modeling_utils").ModelMixin
    found = []
    for name in sorted(dir(importlib.import_module("diffusers.models"))):
        kind = getattr(diffusers, name, None)
        if inspect.isclass(kind) and issubclass(kind, mixin) and kind is not mixin:
            found.append(name)
    return found
