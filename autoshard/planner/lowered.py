"""The collectives inside lowerings: programs of their own that communicate more than shares."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autoshard.cost.comm import collective_s
from autoshard.cost.compute import itemsize
from autoshard.cost.model import Pricer, Step
from autoshard.placement import Shard
from autoshard.plan_types import CollectiveRecord
from autoshard.rules.rule import Inner
from autoshard.strategies import Strategies, Strategy


def lowered_steps(
    strategies: Strategies, choice: tuple[int, ...], pricer: Pricer
) -> Iterator[tuple[int, CollectiveRecord]]:
    """The collectives that the chosen lowerings run, with the class that each belongs to."""
    for index, cls in enumerate(strategies.folded.classes):
        strategy = strategies.choices[index][choice[index]]
        for step, inner in reductions(strategy, pricer):
            yield (
                index,
                CollectiveRecord(
                    kind=step.kind,
                    axis=step.axis,
                    phase=step.phase,
                    tensor_shape=inner.shape,
                    bytes=step.bytes,
                    count=cls.count,
                    time_s=step.time_s,
                    module=cls.module,
                    op=cls.op.target,
                    reason=inner.reason,
                ),
            )


def reductions(strategy: Strategy, pricer: Pricer) -> list[tuple[Step, Inner]]:
    """The collectives that a strategy's lowering runs itself, those of backward when training."""
    found = []
    for inner in strategy.inner:
        if inner.phase == "backward" and not pricer.train:
            continue
        axis = pricer.mesh.axes[_axis(strategy)].name
        ranks, link = pricer.axis_link(axis)
        size = itemsize(inner.dtype) * math.prod(inner.shape) * (ranks if inner.per_rank else 1)
        seconds = collective_s(inner.kind, size, ranks, link)
        found.append((Step(axis, inner.kind, inner.phase, size, seconds), inner))
    return found


def lowered_s(strategy: Strategy, pricer: Pricer) -> float:
    """Seconds of the collectives inside a strategy's lowering."""
    return sum(step.time_s for step, _ in reductions(strategy, pricer))


def _axis(strategy: Strategy) -> int:
    """The mesh axis on which a lowering's operands are split."""
    return next(
        i for layout in strategy.operands for i, p in enumerate(layout) if isinstance(p, Shard)
    )
