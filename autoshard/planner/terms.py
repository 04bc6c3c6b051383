"""Take a step's predicted time apart by what it scales with: hardware rates, batch and sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.cost.comm import collective_parts
from autoshard.cost.model import Pricer, Step
from autoshard.cuts import Dimensions, possible_cuts
from autoshard.graph import TensorMeta
from autoshard.plan_types import CostTerm
from autoshard.planner.decide import Decided
from autoshard.planner.lowered import reductions
from autoshard.planner.survey import Survey

Powers = tuple[int, int]
"""Powers of the batch size and of the sequence length."""
_NO_LIMIT = 2**40


@dataclass(frozen=True)
class Scaling:
    """Which dimensions of a graph's tensors are the batch's and the sequence's.

    Attributes:
        batch, sequence: (class, result, dimension) triples; a flattened dimension may be in both.
    """

    batch: frozenset[tuple[int, int, int]]
    sequence: frozenset[tuple[int, int, int]]

    def of(self, made: tuple[int, int], meta: TensorMeta | None) -> Powers:
        """The powers with which a tensor's size grows."""
        dims = range(len(meta.shape) if meta else 0)
        return (
            sum((*made, dim) in self.batch for dim in dims),
            sum((*made, dim) in self.sequence for dim in dims),
        )


def scaling(survey: Survey) -> Scaling:
    """Follow the inputs' first two dimensions through the graph."""
    cuts = possible_cuts(survey.folded, survey.rules, 1, _NO_LIMIT)
    dimensions = Dimensions(survey.folded, survey.rules, cuts)
    return Scaling(dimensions.dims_of_inputs(0), dimensions.dims_of_inputs(1))


def cost_terms(
    decided: Decided, pricer: Pricer, survey: Survey, scales: Scaling
) -> tuple[CostTerm, ...]:
    """The terms of a decision's step time; they sum to it."""
    totals: dict[tuple[str, int, int], float] = {}
    for what, powers, seconds in (
        *_compute(decided, pricer, survey, scales),
        *_moved(decided, pricer, scales),
        *_lowered(decided, pricer, scales),
    ):
        key = (what, *powers)
        totals[key] = totals.get(key, 0.0) + seconds
    return tuple(
        CostTerm(what, batch, sequence, seconds)
        for (what, batch, sequence), seconds in sorted(totals.items())
        if seconds
    )


# --- operators ----------------------------------------------------------------------------------


def _compute(
    decided: Decided, pricer: Pricer, survey: Survey, scales: Scaling
) -> Iterable[tuple[str, Powers, float]]:
    folded = decided.folded
    for index, cls in enumerate(folded.classes):
        strategy = decided.strategies.choices[index][decided.choice[index]]
        op, metas = cls.op, folded.operand_metas(index)
        if op.kind == "parameter" and op.results[0]:
            seconds = pricer.optimizer_s(op.results[0], strategy.results[0])
            fixed = pricer.hardware.parameter_s if seconds else 0.0
            yield "launch", (0, 0), cls.count * fixed
            yield "memory", (0, 0), cls.count * (seconds - fixed)
            continue
        if op.kind == "output":
            yield "launch", (0, 0), pricer.hardware.step_s
            continue
        powers = _op_powers(decided, index, scales)
        for moves, count in survey.traffic[index].items():
            for work in pricer.work(op, survey.rules[index], strategy, metas, moves):
                for what, seconds in work.parts(pricer.hardware).items():
                    yield what, (0, 0) if what == "launch" else powers, count * seconds


def _op_powers(decided: Decided, index: int, scales: Scaling) -> Powers:
    """The powers of an operator's work: of its largest tensor, and twice the sequence in attention."""
    folded, rule = decided.folded, decided.strategies.rules[index]
    tensors = [((index, i), meta) for i, meta in enumerate(folded.classes[index].op.results)]
    for position, meta in enumerate(folded.operand_metas(index)):
        tensors += [(made, meta) for made in folded.sources.get((index, position), ())[:1]]
    powers = [scales.of(made, meta) for made, meta in tensors]
    batch = max((p[0] for p in powers), default=0)
    sequence = max((p[1] for p in powers), default=0)
    return batch, 2 * sequence if rule and rule.family == "attention" else sequence


# --- conversions --------------------------------------------------------------------------------


def _moved(
    decided: Decided, pricer: Pricer, scales: Scaling
) -> Iterable[tuple[str, Powers, float]]:
    folded, choices = decided.folded, decided.strategies.choices
    for group in folded.groups:
        meta = folded.classes[group.producer].op.results[group.result]
        if meta is None:
            continue
        have = choices[group.producer][decided.choice[group.producer]].results[group.result]
        wants = {choices[n][decided.choice[n]].operands[pos] for n, pos in group.uses}
        powers = scales.of((group.producer, group.result), meta)
        for want in sorted(wants - {have}, key=str):
            for step in pricer.conversion(meta, have, want):
                for what, seconds in _parts(step, pricer):
                    grows = powers if what in ("bandwidth", "memory") else (0, 0)
                    yield what, grows, group.count * seconds


def _lowered(
    decided: Decided, pricer: Pricer, scales: Scaling
) -> Iterable[tuple[str, Powers, float]]:
    """The collectives inside lowerings: what a cross-entropy's grow with is its target."""
    strategies = decided.strategies
    for index, cls in enumerate(strategies.folded.classes):
        strategy = strategies.choices[index][decided.choice[index]]
        metas = strategies.folded.operand_metas(index)
        powers = _op_powers(decided, index, scales)
        for step, shape in reductions(strategy, metas[0], pricer) if strategy.lowering else ():
            for what, seconds in _parts(step, pricer):
                yield what, powers if shape and what == "bandwidth" else (0, 0), cls.count * seconds


def _parts(step: Step, pricer: Pricer) -> Iterable[tuple[str, float]]:
    if not step.kind:
        hardware = pricer.hardware
        launched = not step.bytes or step.time_s == hardware.launch_s
        fixed = step.time_s if launched else hardware.launch_s if hardware.synchronous else 0.0
        yield "launch", fixed
        yield "memory", step.time_s - fixed
        return
    size, link = pricer.axis_link(step.axis)
    parts = collective_parts(step.kind, step.bytes, size, link)
    yield "launch", parts.launch_s
    yield "latency", parts.latency_s
    yield "bandwidth", parts.transfer_s
