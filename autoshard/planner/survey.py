"""Survey a graph once: its classes, their rules, and which tensors go through memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.cost.fusion import in_memory
from autoshard.fold import Folded, fold
from autoshard.graph import Op, OpGraph, Ref
from autoshard.rules.registry import DEFAULT, Registry
from autoshard.rules.rule import Rule
from autoshard.strategies import find_rules

Flags = tuple[tuple[bool, ...], tuple[bool, ...]]


@dataclass(frozen=True)
class Survey:
    """What every search over one graph shares.

    Attributes:
        folded: the classes.
        rules: each class's rule, or None.
        flags: for each class, which operands and results go through memory, and for how many of its
            members: they may differ, as the last layer's sum goes to another kind of operator.
    """

    folded: Folded
    rules: tuple[Rule | None, ...]
    flags: tuple[Counter[Flags], ...]


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
    kept = in_memory(graph, of_op, fused=fused)
    by_name = graph.by_name
    flags = tuple(
        Counter([_flags(by_name[name], kept) for name in cls.members]) for cls in folded.classes
    )
    return Survey(folded, rules, flags)


def _flags(op: Op, kept: dict[Ref, bool]) -> Flags:
    """Which operands and results of an operator go through memory."""
    return (
        tuple([kept[ref] for ref in op.operands]),
        tuple([kept.get(Ref(op.name, i), True) for i in range(len(op.results))]),
    )
