"""Survey a graph once: its classes, their rules, and which tensors go through memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.cost.fusion import Traffic, traffic
from autoshard.fold import Folded, fold
from autoshard.graph import OpGraph
from autoshard.planner.lifetimes import Lifetimes, lifetimes
from autoshard.rules.registry import DEFAULT, Registry
from autoshard.rules.rule import Rule
from autoshard.strategies import find_rules


@dataclass(frozen=True)
class Survey:
    """What every search over one graph shares.

    Attributes:
        folded: the classes.
        rules: each class's rule, or None.
        traffic: for each class, how its members' tensors move, and how many move so: the last layer's
            sum goes to another kind of operator.
        lifetimes: when which memory is held.
    """

    folded: Folded
    rules: tuple[Rule | None, ...]
    traffic: tuple[Counter[Traffic], ...]
    lifetimes: Lifetimes


def survey_graph(
    graph: OpGraph,
    *,
    uniform: bool,
    labels: Mapping[str, str],
    fused: bool,
    train: bool,
    registry: Registry = DEFAULT,
) -> Survey:
    """Fold the graph and look up its rules; see `fold.fold` and `cost.fusion.traffic`."""
    folded = fold(graph, uniform=uniform, labels=labels)
    rules = find_rules(folded, registry)
    of_op = {name: rules[index] for name, index in folded.class_of.items()}
    moves = traffic(graph, of_op, fused=fused)
    counts = tuple(Counter([moves[name] for name in cls.members]) for cls in folded.classes)
    return Survey(folded, rules, counts, lifetimes(folded, rules, train=train))
