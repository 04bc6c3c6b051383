"""From a graph to a plan: strategies, prices, the solve, and the records that tell of it."""

from autoshard.planner.baselines import baselines
from autoshard.planner.decide import Decided, Options, apply_plan, decide, follow_plan, surveyed
from autoshard.planner.record import record
from autoshard.planner.recost import recost

__all__ = [
    "Decided",
    "Options",
    "apply_plan",
    "baselines",
    "decide",
    "follow_plan",
    "record",
    "recost",
    "surveyed",
]
