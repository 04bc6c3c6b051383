"""The models and plans whose predicted steps are held to measured ones; see `cost_model.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.capture.captured import Captured
from autoshard.cost.hardware import load_hardware
from autoshard.mesh import Mesh
from autoshard.plan_types import Plan
from autoshard.planner import Decided, Options, decide, record, surveyed
from autoshard.planner.price import price
from autoshard.planner.record import replicated

Built = tuple[nn.Module, dict[str, Any]]


class Mlp(nn.Module):
    """Two blocks of a wide layer each, and a loss."""

    def __init__(self, width: int = 512, hidden: int = 2048) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self.layers(x), y)


class ConvNet(nn.Module):
    """Convolutions with group norms, between poolings, and a loss."""

    def __init__(self, channels: int = 48) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, into in ((channels, 3), (2 * channels, channels), (4 * channels, 2 * channels)):
            for i in range(2):
                layers.append(nn.Conv2d(width if i else into, width, 3, padding=1))
                layers += [nn.GroupNorm(8, width), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(4 * channels * 16, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self.head(self.layers(x).flatten(1)), y)


def mlp(batch: int = 768) -> Built:
    """4.3 million weights."""
    return Mlp(), {"x": torch.randn(batch, 512), "y": torch.randint(64, (batch,))}


def convnet(batch: int = 16) -> Built:
    """1.2 million weights, on 32 × 32 images."""
    return ConvNet(), {"x": torch.randn(batch, 3, 32, 32), "y": torch.randint(64, (batch,))}


def _ids(batch: int) -> dict[str, Any]:
    ids = torch.randint(1, 1024, (batch, 128))
    return {"input_ids": ids, "labels": ids.clone()}


def llama(batch: int = 4) -> Built:
    """5.7 million weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1024,
    )
    return LlamaForCausalLM(config), {**_ids(batch), "use_cache": False}


def gpt2(batch: int = 4) -> Built:
    """5.8 million weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=384,
        n_layer=3,
        n_head=8,
        vocab_size=1024,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config), {**_ids(batch), "use_cache": False}


def bert(batch: int = 4) -> Built:
    """5.9 million weights."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=3,
        num_attention_heads=8,
        intermediate_size=1536,
        vocab_size=1024,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config), _ids(batch)


def vit(batch: int = 8) -> Built:
    """5.4 million weights, on 64 × 64 images: 65 positions."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384,
        num_hidden_layers=3,
        num_attention_heads=8,
        intermediate_size=1536,
        image_size=64,
        patch_size=8,
        num_labels=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    pixels = torch.randn(batch, 3, 64, 64)
    return ViTForImageClassification(config), {
        "pixel_values": pixels,
        "labels": torch.randint(64, (batch,)),
    }


MODELS: dict[str, tuple[Callable[..., Built], tuple[str, ...]]] = {
    "mlp": (mlp, ("replicated", "tensor", "data")),
    "llama": (llama, ("replicated", "tensor", "sequence", "data")),
    "gpt2": (gpt2, ("replicated", "tensor", "sequence", "data")),
    "bert": (bert, ("replicated", "tensor", "sequence", "data")),
    "vit": (vit, ("replicated", "tensor", "data")),
    "conv": (convnet, ("replicated", "tensor", "data")),
}
"""Name → its builder, and its plans."""
CASES = tuple((name, kind) for name, (_, kinds) in MODELS.items() for kind in kinds)
_WHOLE = (("*", "replicated"),)
KINDS: dict[str, tuple[str, str, tuple[tuple[str, str], ...]]] = {
    "replicated": ("tensor", "tensor", ()),
    "tensor": ("megatron", "tensor", ()),
    "sequence": ("all", "all", _WHOLE),
    "data": ("batch", "all", _WHOLE),
}
"""Kind of plan → what may be split, the search that has all that, and what is pinned."""


def build(name: str, kind: str) -> Built:
    """A model of a case in train mode, and its inputs; the same on every rank.

    A batch of 3 leaves nothing but the sequence to split.
    """
    torch.manual_seed(0)
    make = MODELS[name][0]
    model, kwargs = make(3) if kind == "sequence" else make()
    return model.train(), kwargs


def plan_of(captured: Captured, kind: str, ranks: int) -> Plan:
    """The plan of that kind that is best where links are a hundred times faster than here.

    With such links it pays to split, and yet not to communicate for nothing.
    """
    narrow, search, pinned = KINDS[kind]
    known = load_hardware("cpu-gloo")
    link = replace(
        known.intra,
        latency_s=1e-6,
        launch_s=1e-6,
        bandwidth_bytes_s=1e11,
        kind_bandwidths_bytes_s=(),
        kind_launches_s=(),
    )
    hardware = replace(known, name="fast links", intra=link)
    options = Options(Mesh.of({"tp": ranks}), hardware, search=search, constraints=pinned)
    survey = surveyed(captured.graph, options)
    decided = decide(captured.graph, replace(options, search=narrow), survey)
    if kind == "replicated":
        whole = replicated(decided, survey, options.pricer)["replicated"]
        decided = replace(whole, solution=decided.solution)
    wide = decide(captured.graph, options, survey).strategies
    chosen = [
        found[index]
        for found, index in zip(decided.strategies.choices, decided.choice, strict=True)
    ]
    choice = tuple(f.index(one) for f, one in zip(wide.choices, chosen, strict=True))
    problem = price(wide, options.pricer, survey, None)
    return record(survey, Decided(wide, choice, problem, decided.solution), options, {})
