"""The collectives inside lowerings: programs of their own that communicate more than shares."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.cost.comm import collective_s
from autoshard.cost.compute import itemsize
from autoshard.cost.model import Pricer
from autoshard.graph import TensorMeta
from autoshard.placement import Shard
from autoshard.plan_types import CollectiveRecord
from autoshard.strategies import Strategies, Strategy

_REDUCED = {
    "vocab_cross_entropy": (
        "each rank has a slice of the classes; this finds the greatest logit of each row",
        "each rank has a slice of the classes; this sums each row, and finds the logit of its target",
    ),
    "mean_cross_entropy": (
        "each rank has a slice of the rows; this counts those that are not ignored",
    ),
}


def lowered_steps(
    strategies: Strategies, choice: tuple[int, ...], pricer: Pricer
) -> Iterator[tuple[int, CollectiveRecord]]:
    """The all-reduces that the chosen lowerings run, with the class that each belongs to."""
    for index, cls in enumerate(strategies.folded.classes):
        strategy = strategies.choices[index][choice[index]]
        for number, reason in enumerate(_REDUCED.get(strategy.lowering, ())):
            logits = strategies.folded.operand_metas(index)[0]
            axis, shape = _reduced(strategy, logits, number)
            size = itemsize(logits.dtype) * (shape[0] if shape else 1)
            ranks = pricer.mesh.sizes[axis]
            yield (
                index,
                CollectiveRecord(
                    kind="all_reduce",
                    axis=pricer.mesh.axes[axis].name,
                    phase="forward",
                    tensor_shape=shape,
                    bytes=size,
                    count=cls.count,
                    time_s=collective_s("all_reduce", size, ranks, pricer.hardware.link(ranks, 1)),
                    module=cls.module,
                    op=cls.op.target,
                    reason=reason,
                ),
            )


def _reduced(strategy: Strategy, logits: TensorMeta, number: int) -> tuple[int, tuple[int, ...]]:
    """The mesh axis, and the shape of what the lowering's reduction `number` reduces on it."""
    layout = strategy.operands[0]
    axis, split = next((i, p) for i, p in enumerate(layout) if isinstance(p, Shard))
    if strategy.lowering == "mean_cross_entropy":
        return axis, ()
    rows = logits.numel // logits.shape[split.dim]
    return axis, (rows * (1 + number),)
