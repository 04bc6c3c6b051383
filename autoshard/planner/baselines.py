"""Known plans of the same model, to show beside the chosen one."""

from __future__ import annotations

from dataclasses import replace

from autoshard.errors import SolverError
from autoshard.ilp.solve import solve
from autoshard.placement import Shard
from autoshard.planner.decide import Decided, Options
from autoshard.planner.price import price
from autoshard.planner.survey import Survey
from autoshard.strategies import Strategies, Strategy, derive

KNOWN = {
    "megatron": ("megatron", ""),
    "data_parallel": ("batch", "whole"),
    "fully_sharded": ("batch", "split"),
    "all": ("all", ""),
}
"""Name → what may be split, and how weights are stored ("" as is best)."""


def baselines(survey: Survey, options: Options) -> dict[str, Decided]:
    """The best plan of each known kind, without a memory budget and without constraints.

    - "megatron": weights' dimensions are split, and no statistic is reduced over ranks;
    - "data_parallel": the batch is split, and every weight is whole;
    - "fully_sharded": the batch is split, and every weight is stored split and gathered for use;
    - "all": whatever `search="all"` finds, beside a plan of another search.

    A kind that the model does not have (no batch that divides) is left out.
    """
    if options.mesh.size == 1:
        return {}
    found = {}
    for name, (search, stored) in KNOWN.items():
        if search == options.search:
            continue
        strategies = derive(survey.folded, options.mesh, search=search, rules=survey.rules)
        if search == "batch" and not _splits_any(strategies):
            continue
        strategies = _storing(strategies, stored)
        problem = price(strategies, options.pricer, survey, None)
        try:
            solution = solve(problem, solver=options.solver, time_limit_s=options.time_limit_s)
        except SolverError:
            continue  # a baseline is no part of the answer
        found[name] = Decided(strategies, solution.choice, problem, solution)
    return found


def _splits_any(strategies: Strategies) -> bool:
    """Whether some operator may be split."""
    calls = zip(strategies.folded.classes, strategies.choices, strict=True)
    return any(
        isinstance(placement, Shard)
        for cls, found in calls
        if cls.op.kind == "call"
        for strategy in found
        for layout in strategy.results
        for placement in layout
    )


def _storing(strategies: Strategies, stored: str) -> Strategies:
    """The strategies with weights stored "whole", or "split" where they can be."""
    if not stored:
        return strategies
    choices = [
        _kept(found, stored) if cls.op.kind == "parameter" else found
        for cls, found in zip(strategies.folded.classes, strategies.choices, strict=True)
    ]
    return replace(strategies, choices=tuple(choices))


def _kept(found: tuple[Strategy, ...], stored: str) -> tuple[Strategy, ...]:
    split = tuple(s for s in found if any(isinstance(p, Shard) for p in s.results[0]))
    return split if stored == "split" and split else found[:1]
