"""Fold repeated layers: operators that are equal but for the layer they stand in share one decision.

Two operators are one class when their module path with the indices of repeated blocks starred
(`layers.7.mlp` → `layers.*.mlp`), their operator, arguments, shapes and place in that module agree.
The integer program then has one node a class, whatever the depth of the model.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from autoshard.graph import Op, OpGraph, Ref, TensorMeta


@dataclass(frozen=True)
class OpClass:
    """Operators that share one decision.

    Attributes:
        key: readable and unique: `layers.*.mlp/aten.linear.default#0`.
        op: one of them, which stands for all.
        members: the names of all.
        module: the module path, starred.
    """

    key: str
    op: Op
    members: tuple[str, ...]
    module: str

    @property
    def count(self) -> int:
        """How many operators it has."""
        return len(self.members)


@dataclass(frozen=True)
class ValueGroup:
    """Results of one class that are consumed alike: one tensor, `count` times over.

    Attributes:
        producer: index of the class.
        result: which of its results.
        count: how many such tensors there are.
        uses: the (class, operand position) pairs that take the tensor.
        example: one of the tensors.
    """

    producer: int
    result: int
    count: int
    uses: tuple[tuple[int, int], ...]
    example: Ref


@dataclass(frozen=True)
class Folded:
    """A graph's classes, and the tensors between them.

    Attributes:
        graph: the graph that was folded.
        classes: in the order of their first members.
        class_of: for each operator's name, the index of its class.
        groups: the tensors, grouped by who makes them and who takes them.
        group_of: for each tensor that is taken, the index of its group.
    """

    graph: OpGraph
    classes: tuple[OpClass, ...]
    class_of: dict[str, int]
    groups: tuple[ValueGroup, ...]
    group_of: dict[Ref, int]

    @cached_property
    def sources(self) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
        """For each (class, operand), the (class, result) pairs it may come from."""
        found: dict[tuple[int, int], dict[tuple[int, int], None]] = {}
        for group in self.groups:
            for use in group.uses:
                found.setdefault(use, {})[group.producer, group.result] = None
        return {use: tuple(made) for use, made in found.items()}

    def operand_metas(self, index: int) -> tuple[TensorMeta, ...]:
        """The operand metas of a class."""
        return self.graph.operand_metas(self.classes[index].op)


def star(path: str, blocks: frozenset[str]) -> str:
    """A module path or FQN with the indices of repeated blocks starred.

    An index is starred where the module it names has modules of its own. Those of leaf modules stay:
    the two Linears of a Sequential are not a repeated layer.
    """
    parts = path.split(".")
    if not any(map(str.isdigit, parts)):
        return path
    found = [
        "*" if part.isdigit() and ".".join(parts[: i + 1]) in blocks else part
        for i, part in enumerate(parts)
    ]
    return ".".join(found)


def fold(
    graph: OpGraph, *, uniform: bool = True, labels: Mapping[str, str] | None = None
) -> Folded:
    """Group the operators of `graph` into classes.

    Args:
        graph: what was captured.
        uniform: False gives each operator a class of its own, for a plan in which layers may differ.
        labels: for parameters that a constraint names, what it asks: only equals fold together.
    """
    members: dict[Hashable, list[Op]] = {}
    keys: dict[Hashable, tuple[str, str]] = {}
    seen: dict[Hashable, int] = {}
    starred: dict[str, str] = {}
    for op in graph.ops:
        path = op.target if op.stored else op.module
        if path not in starred:
            starred[path] = star(path, graph.blocks) if uniform else path
        signature = _signature(op, graph)
        position = seen[path, signature] = seen.get((path, signature), -1) + 1
        single = op.name if not uniform else (labels or {}).get(op.name, "")
        key = (starred[path], signature, position, single)
        members.setdefault(key, []).append(op)
        keys.setdefault(key, (starred[path], single))
    classes = _classes(members, keys)
    class_of = {name: index for index, cls in enumerate(classes) for name in cls.members}
    return Folded(graph, classes, class_of, *_groups(graph, class_of))


def _signature(op: Op, graph: OpGraph) -> Hashable:
    """All that a rule may look at."""
    target = op.kind if op.stored else op.target
    return op.kind, target, op.args, op.kwargs, op.results, graph.operand_metas(op), op.pinned


def _classes(
    members: dict[Hashable, list[Op]], keys: dict[Hashable, tuple[str, str]]
) -> tuple[OpClass, ...]:
    numbers: dict[str, int] = {}
    classes = []
    for key, ops in members.items():
        path, single = keys[key]
        what = ops[0].kind if ops[0].stored else f"{path}/{ops[0].target}"
        stem = f"{path}:{what}" if ops[0].stored else what
        stem += f"@{single}" if single else ""
        number = numbers[stem] = numbers.get(stem, -1) + 1
        module = path.rpartition(".")[0] if ops[0].stored else path
        classes.append(OpClass(f"{stem}#{number}", ops[0], tuple(op.name for op in ops), module))
    return tuple(classes)


def _groups(
    graph: OpGraph, class_of: dict[str, int]
) -> tuple[tuple[ValueGroup, ...], dict[Ref, int]]:
    """The groups, and for each tensor the index of its group."""
    found: dict[tuple, list[Ref]] = {}
    for ref, consumers in graph.consumers.items():
        uses = tuple(sorted({(class_of[op.name], position) for op, position in consumers}))
        found.setdefault((class_of[ref.op], ref.index, uses), []).append(ref)
    keys = sorted(found)
    groups = tuple(
        ValueGroup(producer, result, len(found[key]), uses, found[key][0])
        for key in keys
        for producer, result, uses in (key,)
    )
    return groups, {ref: index for index, key in enumerate(keys) for ref in found[key]}
