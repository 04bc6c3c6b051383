"""The benchmark of predicted steps: its plans can be made, and its rank correlation is one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from cost_cases import CASES, KINDS, build, plan_of
from cost_model import spearman

from autoshard.capture import capture
from autoshard.plan_json import encoded, from_json


@pytest.mark.parametrize("kind", [kind for name, kind in CASES if name == "mlp"])
def test_a_plan_of_each_kind_is_made_and_read_again(kind: str) -> None:
    model, kwargs = build("mlp", kind)
    plan = plan_of(capture(model, (), kwargs), kind, 2)
    splits = {weight.split for weight in plan.weights}
    assert (splits == {"replicated"}) == (kind != "tensor")
    assert bool(plan.collectives) == (kind != "replicated")
    assert from_json(encoded(plan).decode()) == plan


def test_every_model_is_replicated_split_and_data_parallel() -> None:
    assert {kind for _, kind in CASES} == set(KINDS)
    assert len(CASES) >= 16


def test_the_rank_correlation() -> None:
    assert spearman([1.0, 2.0, 5.0], [10.0, 20.0, 21.0]) == 1.0
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == -1.0
    assert spearman([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 4.0]) == pytest.approx(0.8)
