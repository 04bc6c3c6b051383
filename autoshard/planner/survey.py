"""Survey a graph once: its classes, their rules, and which tensors go through memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.cost.fusion import in_memory
from autoshard.fold import Folded, fold
from autoshard.graph import OpGraph, Ref
from autoshard.rules.registry import DEFAULT, Registry
from autoshard.rules.rule import Rule
from autoshard.strategies import find_rules


@dataclass(frozen=True)
class Survey:
    """What every search over one graph shares.

    Attributes:
        folded: the classes.
        rules: each class's rule, or None.
        in_memory: for each tensor, whether it goes through memory.
    """

    folded: Folded
    rules: tuple[Rule | None, ...]
    in_memory: dict[Ref, bool]


def survey_graph(
    graph: OpGraph,
    *,
    uniform: bool,
    labels: Mapping[str, str],
    fused: bool,
    registry: Registry = DEFAULT,
) -> Survey:
    """Fold the graph and look up its rules; see `fold.fold` and `cost.fusion.in_memory`."""
    folded = fold(graph, uniform=uniform, labels=labels)
    rules = find_rules(folded, registry)
    of_op = {name: rules[index] for name, index in folded.class_of.items()}
    return Survey(folded, rules, in_memory(graph, of_op, fused=fused))
