"""Equal decisions of repeated layers as one row: 32 down projections are one line of a report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.plan_types import CollectiveRecord, WeightRecord
from autoshard.report import format as fmt


@dataclass(frozen=True)
class WeightRow:
    """Weights of one group that are stored alike.

    Attributes:
        first: one of them, for all that they share.
        count: how many they are.
        stored_bytes: of all of them, on one rank.
        layers: which of the repeated layers ("0–19"), where the group has several rows; else "".
    """

    first: WeightRecord
    count: int
    stored_bytes: int
    layers: str

    @property
    def name(self) -> str:
        """The group's name with the count, or the only weight's own: `layers.*.up.weight ×32`."""
        if self.count == 1 and not self.layers:
            return self.first.fqn
        return f"{self.first.group} ×{self.count}"


def fold_weights(weights: Iterable[WeightRecord]) -> tuple[WeightRow, ...]:
    """`weights` as rows, in the order in which each row's first weight stands."""
    rows: dict[tuple[object, ...], list[WeightRecord]] = {}
    for weight in weights:
        rows.setdefault((weight.group, decision(weight)), []).append(weight)
    groups = [key[0] for key in rows]
    return tuple(
        WeightRow(
            members[0],
            len(members),
            sum(weight.stored_bytes for weight in members),
            _layers(members) if groups.count(group) > 1 else "",
        )
        for (group, _), members in rows.items()
    )


def decision(weight: WeightRecord) -> tuple[object, ...]:
    """All that two weights of one row have in common."""
    return (
        weight.shape,
        weight.dtype,
        weight.split,
        weight.placements,
        weight.local_shape,
        weight.trainable,
    )


def whole_bytes(weight: WeightRecord) -> int:
    """The bytes of the whole weight, of which one rank stores `stored_bytes`."""
    local = math.prod(weight.local_shape)
    return weight.stored_bytes * math.prod(weight.shape) // local if local else 0


def fold_collectives(collectives: Iterable[CollectiveRecord]) -> tuple[CollectiveRecord, ...]:
    """`collectives` with equal ones joined, their counts added."""
    rows: dict[tuple[object, ...], CollectiveRecord] = {}
    for c in collectives:
        key = (c.kind, c.axis, c.phase, c.tensor_shape, c.bytes, c.time_s, c.module, c.op, c.reason)
        count = c.count + (rows[key].count if key in rows else 0)
        rows[key] = CollectiveRecord(
            c.kind, c.axis, c.phase, c.tensor_shape, c.bytes, count, c.time_s, c.module, c.op, c.reason
        )  # fmt: skip
    return tuple(rows.values())


def _layers(members: list[WeightRecord]) -> str:
    """The indices that the stars of the group stand for: of the first star, as ranges."""
    pattern = re.compile(re.escape(members[0].group).replace(r"\*", r"(\d+)"))
    found = [match for weight in members if (match := pattern.fullmatch(weight.fqn))]
    return fmt.ranges(int(match[1]) for match in found if match.lastindex)
