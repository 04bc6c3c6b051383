"""The collectives inside lowerings: programs of their own that communicate more than shares."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.cost.comm import collective_s
from autoshard.cost.compute import itemsize
from autoshard.cost.model import Pricer, Step
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
        reasons = _REDUCED.get(strategy.lowering, ())
        if not reasons:
            continue
        steps = reductions(strategy, strategies.folded.operand_metas(index)[0], pricer)
        for (step, shape), reason in zip(steps, reasons, strict=True):
            yield (
                index,
                CollectiveRecord(
                    kind=step.kind,
                    axis=step.axis,
                    phase=step.phase,
                    tensor_shape=shape,
                    bytes=step.bytes,
                    count=cls.count,
                    time_s=step.time_s,
                    module=cls.module,
                    op=cls.op.target,
                    reason=reason,
                ),
            )


def reductions(
    strategy: Strategy, logits: TensorMeta, pricer: Pricer
) -> list[tuple[Step, tuple[int, ...]]]:
    """The collectives that a strategy's lowering runs itself, each with the shape of what it reduces."""
    found = []
    for number in range(len(_REDUCED.get(strategy.lowering, ()))):
        index, shape = _reduced(strategy, logits, number)
        axis = pricer.mesh.axes[index].name
        size = itemsize(logits.dtype) * (shape[0] if shape else 1)
        ranks, link = pricer.axis_link(axis)
        seconds = collective_s("all_reduce", size, ranks, link)
        found.append((Step(axis, "all_reduce", "forward", size, seconds), shape))
    return found


def lowered_s(strategy: Strategy, operands: tuple[TensorMeta, ...], pricer: Pricer) -> float:
    """Seconds of the collectives inside a strategy's lowering."""
    if strategy.lowering not in _REDUCED:
        return 0.0
    return sum(step.time_s for step, _ in reductions(strategy, operands[0], pricer))


def _reduced(strategy: Strategy, logits: TensorMeta, number: int) -> tuple[int, tuple[int, ...]]:
    """The mesh axis, and the shape of what the lowering's reduction `number` reduces on it."""
    layout = strategy.operands[0]
    axis, split = next((i, p) for i, p in enumerate(layout) if isinstance(p, Shard))
    if strategy.lowering == "mean_cross_entropy":
        return axis, ()
    rows = logits.numel // logits.shape[split.dim]
    return axis, (rows * (1 + number),)
