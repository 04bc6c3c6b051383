"""Mixtures of experts of transformers: split inside every expert, or by experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import IDEAL_ALL, IDEAL_TENSOR, assert_sound, split_share, splits
from torch import nn
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

FLOAT32: dict[str, Any] = {"dtype": torch.float32, "bound": 1e-5}
"""The product of grouped rows knows no float64."""


def model(experts: int = 4, hidden: int = 32) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    config = GraniteMoeConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=experts, num_experts_per_tok=2,
    )  # fmt: skip
    ids = torch.randint(64, (2, 9))
    kwargs = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    return GraniteMoeForCausalLM(config), kwargs


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [IDEAL_TENSOR, IDEAL_ALL], ids=["tensor", "all"])
def test_experts_are_split(ranks: int, options: dict[str, str]) -> None:
    moe, kwargs = model()
    sharded = assert_sound(moe, (), kwargs, ranks=ranks, **FLOAT32, **options)
    if options == IDEAL_TENSOR:
        assert split_share(sharded.plan) > 0.9


@pytest.mark.parametrize(
    ("up", "down"),
    [("expert", "expert"), ("column", "row"), ("expert", "row"), ("row", "column")],
)
def test_experts_as_asked(up: str, down: str) -> None:
    moe, kwargs = model(experts=6)
    asked = {"*experts.gate_up_proj": up, "*experts.down_proj": down}
    sharded = assert_sound(moe, (), kwargs, constraints=asked, **FLOAT32)
    found = splits(sharded.plan)
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.block_sparse_moe.experts"
        assert found[f"{prefix}.gate_up_proj"] == up
        assert found[f"{prefix}.down_proj"] == down


def test_experts_without_tokens() -> None:
    """Every token goes to the same two experts: some ranks have none."""
    moe, kwargs = model(experts=8)
    for layer in moe.get_submodule("model").layers:
        nn.init.zeros_(layer.block_sparse_moe.router.weight)
    asked = {"*experts.*": "expert"}
    assert_sound(moe, (), kwargs, ranks=4, constraints=asked, **FLOAT32)


def test_inside_experts_one_reduction() -> None:
    """Gate and up by column in two blocks, down by row: the shares are summed once, after the tokens."""
    moe, kwargs = model()
    asked = {"*experts.gate_up_proj": "column", "*experts.down_proj": "row"}
    sharded = assert_sound(moe, (), kwargs, constraints=asked, hardware="h100-sxm", **FLOAT32)
    inside = [
        c for c in sharded.plan.collectives
        if c.kind and c.phase == "forward" and c.module.endswith("experts")
    ]  # fmt: skip
    assert sum(c.count for c in inside) <= 2, inside
