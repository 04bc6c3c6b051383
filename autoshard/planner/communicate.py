"""The collectives of a decision: one record for each conversion and lowering that communicates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoshard.cost.model import Pricer, Step
from autoshard.fold import ValueGroup
from autoshard.graph import TensorMeta
from autoshard.placement import Layout, Partial, Replicate, Shard
from autoshard.plan_types import CollectiveRecord
from autoshard.planner import words
from autoshard.planner.decide import Decided
from autoshard.planner.lowered import lowered_steps


@dataclass(frozen=True)
class Conversion:
    """A tensor that is converted, once for all that want it alike.

    Attributes:
        decided: the decision it is part of.
        group: the tensor, with who makes it.
        meta: its shape and type.
        have, want: the layouts.
        takers: the classes that take it in the layout `want`.
    """

    decided: Decided
    group: ValueGroup
    meta: TensorMeta
    have: Layout
    want: Layout
    takers: tuple[int, ...]

    @property
    def maker(self) -> str:
        """What makes the tensor, in words."""
        return words.made(self.decided.strategies, self.group.producer, self.takers)

    @property
    def takers_names(self) -> list[str]:
        """What takes the tensor, in words."""
        strategies, producer = self.decided.strategies, self.group.producer
        found = [words.taken(strategies, node, producer) for node in self.takers]
        return list(dict.fromkeys(name for names in found for name in names))


def collectives(decided: Decided, pricer: Pricer) -> tuple[CollectiveRecord, ...]:
    """Every collective of a step, in the order they run: forward, then the way back.

    Copies inside a rank's memory, which a conversion may take too, are priced but are no collectives.
    """
    forward: list[tuple[int, CollectiveRecord]] = []
    backward: list[tuple[int, CollectiveRecord]] = []
    for found in conversions(decided):
        for step in pricer.conversion(found.meta, found.have, found.want):
            if step.kind:
                made = forward if step.phase == "forward" else backward
                made.append((min(found.takers), _record(found, step)))
    forward += lowered_steps(decided.strategies, decided.choice, pricer)
    forward.sort(key=lambda item: item[0])
    backward.sort(key=lambda item: -item[0])
    return _joined([record for _, record in forward + backward])


def conversions(decided: Decided) -> Iterator[Conversion]:
    """What a decision converts, tensor after tensor."""
    choices, choice = decided.strategies.choices, decided.choice
    for group in decided.folded.groups:
        if decided.folded.classes[group.producer].op.results[group.result] is None:
            continue
        meta = decided.folded.graph.meta(group.example)
        have = choices[group.producer][choice[group.producer]].results[group.result]
        wanted: dict[Layout, list[int]] = {}
        for node, position in group.uses:
            wanted.setdefault(choices[node][choice[node]].operands[position], []).append(node)
        for want, takers in wanted.items():
            if want != have:
                yield Conversion(decided, group, meta, have, want, tuple(dict.fromkeys(takers)))


def _joined(records: list[CollectiveRecord]) -> tuple[CollectiveRecord, ...]:
    """Records that differ in nothing but their counts as one."""
    counts: dict[CollectiveRecord, int] = {}
    for record in records:
        key = replace(record, count=0)
        counts[key] = counts.get(key, 0) + record.count
    return tuple(replace(record, count=count) for record, count in counts.items())


def _record(found: Conversion, step: Step) -> CollectiveRecord:
    """A forward collective is where its tensor is made, a backward one where the gradient is."""
    folded = found.decided.folded
    axis = [a.name for a in found.decided.strategies.mesh.axes].index(step.axis)
    places = (found.group.producer,) if step.phase == "forward" else found.takers
    op = folded.classes[places[0]].op
    tell = _forward if step.phase == "forward" else _backward
    return CollectiveRecord(
        kind=step.kind,
        axis=step.axis,
        phase=step.phase,
        tensor_shape=found.meta.shape,
        bytes=step.bytes,
        count=found.group.count,
        time_s=step.time_s,
        module=words.common_module(folded, places),
        op=op.target if op.kind == "call" else op.kind,
        reason=tell(found, axis),
    )


def _forward(found: Conversion, axis: int) -> str:
    """Why a tensor is communicated, on the mesh's `axis`."""
    have, want = found.have[axis], found.want[axis]
    op = found.decided.folded.classes[found.group.producer].op
    takers = words.listed(found.takers_names)
    if isinstance(have, Partial):
        kept = f", each rank keeping its slice for {takers}" if isinstance(want, Shard) else ""
        return f"each rank's result of {found.maker} is a share; the shares are summed{kept}"
    what = found.maker if op.kind != "call" else f"the result of {found.maker}"
    if isinstance(have, Shard) and isinstance(want, Shard):
        slices = f"each rank has a slice of dimension {have.dim} of {what}"
        return f"{slices}; exchanged for one of dimension {want.dim}, for {takers}"
    holds = "stores" if op.stored else "has"
    gathered = "for it is returned whole" if takers == words.OUTPUT else f"whole for {takers}"
    return f"each rank {holds} a slice of {what}; gathered, {gathered}"


def _backward(found: Conversion, axis: int) -> str:
    """Why a tensor's gradient is communicated, on the mesh's `axis`."""
    have, want = found.have[axis], found.want[axis]
    names = found.takers_names
    op = found.decided.folded.classes[found.group.producer].op
    what = found.maker if op.stored else f"the input of {words.listed(names)}"
    if isinstance(have, Shard) and isinstance(want, Shard):
        return f"the gradient of {what} goes back to slices of dimension {have.dim}"
    if isinstance(want, Replicate):
        kept = ", each rank keeping its slice" if isinstance(have, Shard) else ""
        once = "" if op.stored or kept else words.for_all(len(names))
        return f"each rank's gradient of {what} is a share; the shares are summed{once}{kept}"
    return f"each rank has the gradient of its slice of {what}; gathered"
