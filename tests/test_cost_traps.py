"""The known traps of cost models, each with a test named after it."""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import re
from pathlib import Path

import pytest
import torch
from models import mlp
from rich.console import Console
from torch import nn

import autoshard
from autoshard import Plan
from autoshard.cost.calibration import calibrated
from autoshard.cost.comm import collective_s, copy_s
from autoshard.cost.fit import checked, linear, scale
from autoshard.cost.hardware import load_hardware
from autoshard.cost.model import Pricer
from autoshard.errors import CalibrationError
from autoshard.graph import TensorMeta
from autoshard.mesh import Mesh
from autoshard.placement import I, R
from autoshard.plan_profile import changed_profile

H100 = load_hardware("h100-sxm")


def planned(**options) -> tuple[nn.Module, dict, Plan]:
    model, kwargs = mlp()
    return model, kwargs, autoshard.plan(model, 2, (), kwargs, **options)


def outdated(plan: Plan) -> Plan:
    """The plan as one that was made when the profile had other numbers."""
    cost = dataclasses.replace(plan.cost, compute_s=2 * plan.cost.compute_s)
    collectives = tuple(dataclasses.replace(c, time_s=2 * c.time_s) for c in plan.collectives)
    return dataclasses.replace(
        plan, cost=cost, collectives=collectives, hardware_hash="0123456789abcdef"
    )


def test_plan_costs_are_recomputed_on_load_with_a_warning_where_the_profile_differs(
    tmp_path: Path, caplog
) -> None:
    model, kwargs, plan = planned()
    outdated(plan).save(tmp_path / "old.json")
    with caplog.at_level(logging.WARNING, "autoshard"):
        old = Plan.load(tmp_path / "old.json")
    assert "profile 'h100-sxm' with other numbers" in caplog.text
    caplog.clear()
    for apply in (
        lambda: autoshard.plan(model, 2, (), kwargs, plan=old),
        lambda: autoshard.autoshard(model, 2, (), kwargs, plan=tmp_path / "old.json").plan,
    ):
        with caplog.at_level(logging.WARNING, "autoshard"):
            again = apply()
        assert "Priced again" in caplog.text
        assert "Priced again" in again.notes[-1]
        assert again.cost.step_s == plan.cost.step_s
        assert again.collectives == plan.collectives
        assert again.choices == plan.choices
        assert again.hardware_hash == plan.hardware_hash == H100.hash
        caplog.clear()


def test_plan_costs_of_another_version_are_recomputed_with_a_note(caplog) -> None:
    model, kwargs, plan = planned()
    old = dataclasses.replace(outdated(plan), hardware_hash=plan.hardware_hash)
    again = autoshard.plan(model, 2, (), kwargs, plan=old)
    assert again.cost.step_s == plan.cost.step_s
    assert "another version of autoshard" in again.notes[-1]
    assert "another version of autoshard" in caplog.text


def test_a_plan_whose_profile_is_as_it_was_is_applied_silently(tmp_path: Path, caplog) -> None:
    model, kwargs, plan = planned(search="all")
    plan.save(tmp_path / "plan.json")
    with caplog.at_level(logging.WARNING, "autoshard"):
        assert autoshard.plan(model, 2, (), kwargs, plan=tmp_path / "plan.json") == plan
    assert not [r for r in caplog.records if r.name == "autoshard"]


def test_a_plan_is_priced_on_the_hardware_that_it_is_applied_with(caplog) -> None:
    model, kwargs, plan = planned()
    with caplog.at_level(logging.WARNING, "autoshard"):
        again = autoshard.plan(model, 2, (), kwargs, plan=plan, hardware="l40s-pcie")
    there = autoshard.plan(model, 2, (), kwargs, hardware="l40s-pcie")
    assert [w.placements for w in there.weights] == [w.placements for w in plan.weights]
    assert again.cost.step_s == pytest.approx(there.cost.step_s)
    assert again.hardware == "l40s-pcie"
    assert "made for h100-sxm and is priced on l40s-pcie" in caplog.text


def test_a_plan_of_an_unknown_profile_keeps_its_costs(caplog) -> None:
    mine = dataclasses.replace(H100, name="my-cluster", memory_efficiency=0.5)
    model, kwargs, plan = planned(hardware=mine)
    assert autoshard.plan(model, 2, (), kwargs, plan=plan) == plan
    assert autoshard.plan(model, 2, (), kwargs, plan=plan, hardware=mine) == plan
    assert not changed_profile(plan)


def test_the_hash_of_a_profile_is_of_its_numbers() -> None:
    assert H100.hash == dataclasses.replace(H100, name="x", source="y").hash
    for field, value in (("launch_s", 9e-6), ("memory_bytes", 1), ("ranks_per_node", 2)):
        assert H100.hash != dataclasses.replace(H100, **{field: value}).hash
    link = dataclasses.replace(H100.intra, latency_s=1e-3)
    assert H100.hash != dataclasses.replace(H100, intra=link).hash


def test_small_batch_slow_link_n_ranks_slower_than_one_is_said_in_red() -> None:
    model, kwargs = mlp()
    forced = {"net.0.weight": "column", "net.3.weight": "row"}
    plan = autoshard.plan(model, 2, (), kwargs, hardware="l40s-pcie", constraints=forced)
    file = io.StringIO()
    plan.report(Console(file=file, width=100, color_system="truecolor", force_terminal=True))
    assert re.search(
        r"\x1b\[1;31mSLOWER than no sharding at all: 2 ranks together", file.getvalue()
    )
    free = autoshard.plan(model, 2, (), kwargs, hardware="l40s-pcie")
    file = io.StringIO()
    free.report(Console(file=file, width=100))
    assert "SLOWER" not in file.getvalue()


class ThreeTakers(nn.Module):
    """The sum of a row-parallel product is wanted whole by three column-parallel ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(16, 16, bias=False)
        self.q, self.k, self.v = (nn.Linear(16, 32, bias=False) for _ in range(3))
        self.out = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        x = self.down(x)
        return self.out(self.q(x) * self.k(x) * self.v(x))


def test_a_conversion_wanted_by_three_consumers_is_paid_once_forward_and_backward() -> None:
    torch.manual_seed(0)
    model, x = ThreeTakers(), torch.randn(4, 16)
    splits = {"down.weight": "row", "[qkv].weight": "column", "out.weight": "row"}
    sharded = autoshard.autoshard(model, 2, (x,), constraints=splits, hardware="l40s-pcie")
    plan = sharded.plan
    hidden = [c for c in plan.collectives if c.module == "down" or "all three" in c.reason]
    assert [(c.kind, c.phase, c.count) for c in hidden] == [
        ("all_reduce", "forward", 1),
        ("all_reduce", "backward", 1),
    ]
    # Nothing else is moved but the last sum; local copies of slices are the rest of the time.
    assert [c.module for c in plan.collectives if c not in hidden] == ["out"]
    copies = copy_s(4 * 16 * 4 // 2, load_hardware("l40s-pcie"))
    told = sum(c.count * c.time_s for c in plan.collectives)
    assert told <= plan.cost.comm_s <= told + 3 * copies
    code = sharded.graph_module.print_readable(print_output=False)
    assert code.count("torch.ops.autoshard.partial_to_replicate") == 1


def test_a_replicated_weight_meeting_a_sharded_activation_pays_its_gradient_reduction() -> None:
    """Data parallelism is not free: every weight's gradient is summed, at its own size."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64))
        x = torch.zeros(65536, 64)
    whole = {"*": "replicated"}
    plan = autoshard.plan(model, 4, (x,), search="all", constraints=whole, hardware="h100-sxm")
    summed = {
        c.tensor_shape for c in plan.collectives if c.phase == "backward" and c.kind == "all_reduce"
    }
    assert {tuple(w.shape) for w in plan.weights} <= summed
    paid = sum(c.bytes * c.count for c in plan.collectives if c.phase == "backward")
    assert paid >= sum(4 * math.prod(w.shape) for w in plan.weights)


@pytest.mark.parametrize("split", [("dp",), ("tp",), ("dp", "tp")])
def test_a_gradient_reduction_is_paid_on_every_axis_that_shards_the_activation(split) -> None:
    mesh = Mesh.of({"dp": 2, "tp": 4})
    pricer = Pricer(H100, mesh, train=True)
    weight = TensorMeta((256, 64), "float32", True)
    used = tuple(R if axis.name in split else I for axis in mesh.axes)
    steps = pricer.conversion(weight, (I, I), used)
    assert [(s.axis, s.kind, s.phase) for s in steps] == [
        (a, "all_reduce", "backward") for a in split
    ]
    for step in steps:
        assert step.bytes == 256 * 64 * 4
        ranks, link = pricer.axis_link(step.axis)
        assert step.time_s == collective_s("all_reduce", step.bytes, ranks, link) > 0


@pytest.mark.parametrize("value", [None, 0, 0.0, -1e-6, math.nan, math.inf])
def test_a_failed_or_missing_measurement_is_an_error_never_zero(value) -> None:
    with pytest.raises(CalibrationError, match="no measurement"):
        checked(value, "an all-reduce")
    with pytest.raises(CalibrationError):
        linear([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [1e-3, value, 2e-3])
    with pytest.raises(CalibrationError):
        scale(lambda x: [x, x], [1e-3, value], 1e-6, 1.0)


def test_a_calibration_without_measurements_is_an_error() -> None:
    with pytest.raises(CalibrationError):
        calibrated(H100, [])
