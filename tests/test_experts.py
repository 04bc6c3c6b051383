"""Mixtures of experts of transformers: split inside every expert, or by experts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle import IDEAL_ALL, IDEAL_TENSOR, assert_sound, split_share, splits
from processes import run_ranks
from torch import nn
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

import autoshard
from autoshard.cuts import reaches
from autoshard.rules import DEFAULT
from autoshard.rules.rule import Call, Rule, whole
from autoshard.runtime.exchanges import grouped_products

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


# --- tokens that travel to their experts --------------------------------------------------------


def exchanged(plan: autoshard.Plan) -> set[str]:
    """The operators whose rows travel between ranks."""
    return {c.key.rpartition("/")[2][:-2] for c in plan.choices if "[exchanged_" in c.strategy}


PRODUCT = "transformers.grouped_mm_fallback.default"


@contextmanager
def no_other_way() -> Iterator[None]:
    """Grouped products are split by rows and experts together, or not at all."""
    known = DEFAULT._functions[PRODUCT]

    def rows_alone(call: Call) -> Rule | None:
        rule = known(call)
        return rule and replace(
            rule,
            sizes=tuple(item for item in rule.sizes if item[0] == "rows"),
            operands=tuple(whole(meta.shape) for meta in call.operands),
            results=(whole(call.out),),
        )

    with mock.patch.dict(DEFAULT._functions, {PRODUCT: rows_alone}):
        yield


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("experts", [8, 5])
def test_tokens_are_exchanged(experts: int, ranks: int) -> None:
    """Tokens and experts are split: 36 rows on 3 ranks, and 5 experts where each rank has one."""
    moe, kwargs = model(experts=experts)
    with no_other_way():
        sharded = assert_sound(moe, (), kwargs, ranks=ranks, **FLOAT32, **IDEAL_ALL)
    if reaches(experts, ranks):
        assert PRODUCT in exchanged(sharded.plan)


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_tokens_travel_to_one_rank(ranks: int) -> None:
    moe, kwargs = model(experts=8)
    for layer in moe.get_submodule("model").layers:
        nn.init.zeros_(layer.block_sparse_moe.router.weight)
    with no_other_way():
        sharded = assert_sound(moe, (), kwargs, ranks=ranks, **FLOAT32, **IDEAL_ALL)
    assert PRODUCT in exchanged(sharded.plan)


def test_tokens_stay_whole_under_tensor() -> None:
    moe, kwargs = model(experts=8)
    plan = autoshard.plan(moe, 2, (), kwargs, **IDEAL_TENSOR)
    assert exchanged(plan) == set()


def test_products_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(9, 4, requires_grad=True), torch.randn(3, 4, 5, requires_grad=True)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    given = torch.randn(9, 5)
    wanted = grouped_products(x, weight, ends)
    gradients = torch.autograd.grad(wanted, (x, weight), given)
    monkeypatch.setattr(torch.ops, "transformers", object())
    found = grouped_products(x, weight, ends)
    torch.testing.assert_close(found, wanted)
    for a, b in zip(torch.autograd.grad(found, (x, weight), given), gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_many_tokens_travel_to_their_experts() -> None:
    moe, kwargs = wide()
    plan = autoshard.plan(moe, 8, (), kwargs, hardware="h100-sxm", search="all")
    assert exchanged(plan) == {PRODUCT, "aten.index.Tensor"}
    found = {w.split for w in plan.weights if ".experts." in w.fqn}
    assert found == {"expert"}
    kinds = {
        c.kind for c in plan.collectives if c.module.endswith("experts") and c.phase == "forward"
    }
    assert "all_to_all" in kinds


def wide() -> tuple[nn.Module, dict[str, Any]]:
    config = GraniteMoeConfig(
        vocab_size=1024, hidden_size=2048, intermediate_size=1408, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=16, num_local_experts=64, num_experts_per_tok=6,
    )  # fmt: skip
    with torch.device("meta"):
        moe = GraniteMoeForCausalLM(config)
        ids = torch.zeros(8, 2048, dtype=torch.long)
    return moe, {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def on_gloo() -> set[str]:
    moe, kwargs = model(experts=8)
    with no_other_way():
        world = dist.get_world_size()
        sharded = autoshard.autoshard(copy.deepcopy(moe), world, (), kwargs, **IDEAL_ALL)
    wanted, found = moe(**kwargs), sharded(**kwargs)
    torch.testing.assert_close(found.loss, wanted.loss)
    wanted.loss.backward()
    found.loss.backward()
    ours = dict(sharded.named_parameters())
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(
            ours[name].grad.full_tensor(), parameter.grad, atol=1e-6, rtol=1e-4
        )
    return exchanged(sharded.plan)


@pytest.mark.gloo
def test_tokens_travel_between_processes() -> None:
    for found in run_ranks(on_gloo, 2):
        assert PRODUCT in found
