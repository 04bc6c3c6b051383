"""The collectives inside lowerings: programs of their own that communicate more than shares."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.cost.comm import collective_s
from autoshard.cost.compute import itemsize
from autoshard.cost.model import Pricer
from autoshard.plan_types import CollectiveRecord
from autoshard.placement import Shard
from autoshard.strategies import Strategies

_REDUCED = {
    "vocab_cross_entropy": ("the rows' maximum", "the rows' sum and picked logit"),
    "mean_cross_entropy": ("the number of rows that count",),
}


def lowered_steps(
    strategies: Strategies, choice: tuple[int, ...], pricer: Pricer
) -> Iterable[CollectiveRecord]:
    """The all-reduces that the chosen lowerings run, a few bytes a row each."""
    for index, cls in enumerate(strategies.folded.classes):
        strategy = strategies.choices[index][choice[index]]
        for number, what in enumerate(_REDUCED.get(strategy.lowering, ())):
            logits = strategies.folded.operand_metas(index)[0]
            yield _reduction(cls.module, cls.op.target, cls.count, logits, strategy, number, what, pricer)


def _reduction(module, target, count, logits, strategy, number, what, pricer) -> CollectiveRecord:  # noqa: ANN001
    axis = next(i for i, p in enumerate(strategy.operands[0]) if isinstance(p, Shard))
    rows = logits.numel // logits.shape[strategy.operands[0][axis].dim]
    scalar = strategy.lowering == "mean_cross_entropy"
    shape = () if scalar else (rows * (1 + number),)
    size = itemsize(logits.dtype) * (1 if scalar else shape[0])
    n = pricer.mesh.sizes[axis]
    time_s = collective_s("all_reduce", size, n, pricer.hardware.link(n, 1))
    return CollectiveRecord(
        "all_reduce", pricer.mesh.axes[axis].name, "forward", shape, size, count, time_s, module, target, what
    )
