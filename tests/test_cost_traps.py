"""The known traps of cost models, each with a test named after it."""

from __future__ import annotations

import dataclasses
import io
import logging
import re
from pathlib import Path

import pytest
from models import mlp
from rich.console import Console
from torch import nn

import autoshard
from autoshard import Plan
from autoshard.cost.hardware import load_hardware
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
