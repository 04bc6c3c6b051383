"""A plan in which some operators run as a test says: what a pattern goes wrong on is then surely there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oracle import doubled
from torch import nn

from autoshard import Plan
from autoshard.capture import capture
from autoshard.capture.footprints import with_footprints
from autoshard.cost.hardware import load_hardware
from autoshard.ilp.solve import solve
from autoshard.mesh import Mesh
from autoshard.planner import Decided, Options
from autoshard.planner.constrain import constrained
from autoshard.planner.decide import surveyed
from autoshard.planner.price import price
from autoshard.planner.record import record
from autoshard.strategies import derive


def pinned_plan(
    model: nn.Module,
    args: tuple[Any, ...],
    ranks: int,
    strategies: Mapping[str, str],
    constraints: Mapping[str, str] | None = None,
    search: str = "all",
    *,
    shares: bool = False,
) -> Plan:
    """The cheapest plan, for `model` and `args` in float64, in which operators run by given strategies.

    Args:
        model, args: as `oracle.assert_sound` takes them.
        ranks: of the mesh.
        strategies: for every operator whose key contains a text, its strategy as plans have it.
        constraints, search: as `autoshard.plan` takes them.
        shares: whether operators that can take and make shares do, so that these are summed last of all.
    """
    model, args = doubled(model, args)
    graph = with_footprints(capture(model, args, {}))
    options = Options(
        Mesh.of({"tp": ranks}), load_hardware("ideal"), search=search,
        constraints=tuple((constraints or {}).items()),
    )  # fmt: skip
    survey = surveyed(graph, options)
    found = derive(survey.folded, options.mesh, search=search, rules=survey.rules)
    found = constrained(found, options.constraints)
    choices, used = list(found.choices), set()
    for index, cls in enumerate(found.folded.classes):
        if shares:
            late = tuple(s for s in choices[index] if s.factor == "share")
            choices[index] = late or choices[index]
        for text in strategies:
            if text in cls.key:
                choices[index] = tuple(s for s in choices[index] if str(s) == strategies[text])
                assert choices[index], f"{cls.key}: {'; '.join(map(str, found.choices[index]))}"
                used.add(text)
    assert used == set(strategies), [cls.key for cls in found.folded.classes]
    problem = price(replace(found, choices=tuple(choices)), options.pricer, survey, None)
    solution = solve(problem)
    choice = tuple(
        every.index(some[i])
        for every, some, i in zip(found.choices, choices, solution.choice, strict=True)
    )
    problem = price(found, options.pricer, survey, None)
    return record(survey, Decided(found, choice, problem, solution), options, {})
