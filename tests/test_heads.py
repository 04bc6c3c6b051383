"""Heads that the ranks do not divide: cut as whole heads, uneven ones, wherever each rank gets one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import IDEAL_ALL, IDEAL_TENSOR, assert_sound, split_share
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.cuts import reaches

SLOW = pytest.mark.slow
RANKS = pytest.mark.parametrize(
    "ranks",
    [2, 3, pytest.param(4, marks=SLOW), pytest.param(5, marks=SLOW), pytest.param(8, marks=SLOW)],
)
WORDS = 120
BOUND = 2e-6
"""These models make norms and losses in float32."""


def _inputs(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    ids = torch.randint(WORDS, (2, 8))
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def grouped(heads: int, kv_heads: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=4 * heads, intermediate_size=WORDS, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def fused(heads: int) -> nn.Module:
    config = GPT2Config(
        vocab_size=WORDS, n_embd=4 * heads, n_inner=WORDS, n_layer=2, n_head=heads, n_positions=32,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def attention(plan: autoshard.Plan) -> list[str]:
    """The state in which attention leaves its heads."""
    found = [c.strategy.partition(" -> ")[2] for c in plan.choices if "scaled_dot" in c.key]
    return [strategy.partition(" [")[0] for strategy in found]


@RANKS
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 3), (14, 2), (7, 1), (5, 5), (12, 4)])
def test_grouped_queries(heads: int, kv_heads: int, ranks: int) -> None:
    sharded = assert_sound(
        grouped(heads, kv_heads), (), _inputs(), ranks=ranks, bound=BOUND, **IDEAL_TENSOR
    )
    if reaches(heads, ranks):
        assert attention(sharded.plan) == ["S(1)"]
        assert split_share(sharded.plan) == 1.0


@RANKS
@pytest.mark.parametrize("heads", [5, 6])
def test_a_fused_weight(heads: int, ranks: int) -> None:
    sharded = assert_sound(fused(heads), (), _inputs(), ranks=ranks, bound=BOUND, **IDEAL_TENSOR)
    if reaches(heads, ranks):
        assert attention(sharded.plan) == ["S(1)"]
        assert split_share(sharded.plan) > 0.9


@pytest.mark.parametrize("options", [{"hardware": "h100-sxm"}, IDEAL_ALL], ids=["h100", "all"])
def test_other_prices(options: dict[str, str]) -> None:
    assert_sound(grouped(7, 1), (), _inputs(), ranks=3, bound=BOUND, **options)


def test_what_is_moved_for_whole_heads() -> None:
    """14 heads of 64 on 4 ranks: 896 features in slices of 224, heads in slices of 256."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=896, intermediate_size=4864, num_hidden_layers=1,
        num_attention_heads=14, num_key_value_heads=2,
    )  # fmt: skip
    ids = torch.zeros(1, 2048, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    plan = autoshard.plan(
        model, 4, (), {"input_ids": ids}, hardware="h100-sxm", constraints={"*q_proj*": "column"}
    )
    assert attention(plan) == ["S(1)"]
    moved = [c for c in plan.collectives if "whole parts" in c.reason]
    assert {(c.kind, c.phase) for c in moved} == {
        ("all_gather", "forward"),
        ("reduce_scatter", "backward"),
    }
    assert {c.bytes for c in moved} == {2048 * 96 * 4 * 4}
