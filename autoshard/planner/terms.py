"""Take a step's predicted time apart by what it scales with: hardware rates, batch and sequence."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace

from autoshard.cost.comm import collective_parts, copy_rate
from autoshard.cost.fusion import Traffic
from autoshard.cost.model import Pricer, Step
from autoshard.cost.work import Work
from autoshard.plan_types import CostTerm, Part
from autoshard.planner.decide import Decided
from autoshard.planner.lowered import reductions
from autoshard.planner.scaling import Growth, Powers, Scaling, growth
from autoshard.planner.survey import Survey

DEGREE = 2
"""The greatest power of the batch and of the sequence that is told apart."""
Counted = tuple[float, CostTerm]
"""How many there are of a term."""


def cost_terms(
    decided: Decided, pricer: Pricer, survey: Survey, scales: Scaling
) -> tuple[CostTerm, ...]:
    """The terms of a decision's step time; they sum to it."""
    return joined(
        [
            *_compute(decided, pricer, survey, scales),
            *_moved(decided, pricer, scales),
            *_lowered(decided, pricer, scales),
        ]
    )


def joined(terms: Iterable[Counted]) -> tuple[CostTerm, ...]:
    """The terms with what is alike added up, and without options that are never picked.

    Terms whose options are in the same proportion are one: the greatest of twice the sums is twice the
    greatest. What has one option is added to one term without a choice.
    """
    sums: dict[tuple[str, int, int], float] = {}
    choices: dict[tuple, float] = {}
    for count, term in terms:
        options = _picked(term)
        if len(options) == 1:
            for part in options[0]:
                key = (part.scales_with, part.batch, part.sequence)
                sums[key] = sums.get(key, 0.0) + count * part.seconds
            continue
        seconds = (math.fsum(part.seconds for part in option) for option in options)
        whole = (max if term.pick == "max" else min)(seconds)
        key = (term.pick, tuple(sorted(_relative(option, whole) for option in options)))
        choices[key] = choices.get(key, 0.0) + count * whole
    plain = tuple(Part(s, *key) for key, s in sorted(sums.items()) if s)
    found = [CostTerm("max", (plain,))] if plain else []
    for (pick, options), whole in sorted(choices.items()):
        found.append(CostTerm(pick, _absolute(pick, options, whole)))
    return tuple(found)


def _relative(option: tuple[Part, ...], whole: float) -> tuple:
    """An option's parts, with their seconds as shares of `whole` to seven digits."""
    return tuple((p.scales_with, p.batch, p.sequence, f"{p.seconds / whole:.6e}") for p in option)


def _absolute(pick: str, options: tuple, whole: float) -> tuple[tuple[Part, ...], ...]:
    """Options from shares, scaled so that the one that is picked takes exactly `whole`."""
    shares = [[float(part[3]) for part in option] for option in options]
    scale = whole / (max if pick == "max" else min)(map(math.fsum, shares))
    return tuple(
        tuple(Part(share * scale, *part[:3]) for part, share in zip(option, given, strict=True))
        for option, given in zip(options, shares, strict=True)
    )


def _picked(term: CostTerm) -> tuple[tuple[Part, ...], ...]:
    """The options that another one does not beat in every part."""
    kept: list[tuple[Part, ...]] = []
    for given in term.options:
        option = tuple(part for part in given if part.seconds)
        if not any(_beats(other, option, term.pick) for other in kept):
            kept = [other for other in kept if not _beats(option, other, term.pick)]
            kept.append(option)
    return tuple(kept)


def _beats(one: tuple[Part, ...], other: tuple[Part, ...], pick: str) -> bool:
    """Whether `one` is picked before `other` whatever the batch, the sequence and the links are."""
    more, less = (one, other) if pick == "max" else (other, one)
    held = {_scales(part): part.seconds for part in more}
    return all(held.get(_scales(part), 0.0) >= part.seconds for part in less)


def _scales(part: Part) -> tuple[bool | str, int, int]:
    """What moves a part's time, of what may move: peaks and launches stay as they are."""
    moves = part.scales_with in ("bandwidth", "latency") and part.scales_with
    return moves, part.batch, part.sequence


def _alone(count: float, seconds: float, scales_with: str, powers: Powers = (0, 0)) -> Counted:
    return count, CostTerm("max", ((Part(seconds, scales_with, *powers),),))


# --- operators ----------------------------------------------------------------------------------


def _compute(
    decided: Decided, pricer: Pricer, survey: Survey, scales: Scaling
) -> Iterable[Counted]:
    folded, known = decided.folded, dict[Hashable, list[CostTerm]]()
    for index, cls in enumerate(folded.classes):
        strategy = decided.strategies.choices[index][decided.choice[index]]
        op = cls.op
        if op.kind == "parameter" and op.results[0]:
            seconds = pricer.optimizer_s(op.results[0], strategy.results[0])
            fixed = pricer.hardware.parameter_s if seconds else 0.0
            yield _alone(cls.count, fixed, "launch")
            yield _alone(cls.count, seconds - fixed, "memory")
        elif op.kind == "output":
            yield _alone(1, pricer.hardware.step_s, "launch")
        elif op.kind == "call":
            alike = _alike(decided, index, scales)
            for moves, count in survey.traffic[index].items():
                if (alike, moves) not in known:
                    known[alike, moves] = _kernels(decided, index, pricer, scales, moves)
                yield from ((count, term) for term in known[alike, moves])


def _alike(decided: Decided, index: int, scales: Scaling) -> Hashable:
    """All that a call's price depends on: layers that are not folded have many that are equal."""
    folded, op = decided.folded, decided.folded.classes[index].op
    places = [(index, i) for i in range(len(op.results))]
    places += [folded.sources[index, i][0] for i in range(len(op.operands))]
    metas = folded.operand_metas(index)
    grow = tuple(
        tuple(scales.dims.get((*made, dim), (0, 0)) for dim in range(len(meta.shape)))
        for made, meta in zip(places, (*op.results, *metas), strict=True)
        if meta
    )
    strategy = decided.strategies.choices[index][decided.choice[index]]
    return op.target, op.args, op.kwargs, op.results, metas, strategy, grow


def _kernels(
    decided: Decided, index: int, pricer: Pricer, scales: Scaling, moves: Traffic
) -> list[CostTerm]:
    """The kernels of one operator: its price, followed over larger batches and sequences."""
    folded, rule = decided.folded, decided.strategies.rules[index]
    op, metas = folded.classes[index].op, folded.operand_metas(index)
    strategy = decided.strategies.choices[index][decided.choice[index]]
    made = [folded.sources[index, position][0] for position in range(len(metas))]
    degrees = _degrees(decided, index, scales)

    @functools.cache
    def work(by: Powers) -> tuple[Work, ...]:
        results = [
            meta and scales.scaled((index, i), meta, by) for i, meta in enumerate(op.results)
        ]
        operands = [scales.scaled(m, meta, by) for m, meta in zip(made, metas, strict=True)]
        grown = replace(op, results=tuple(results))
        scaled = rule and scales.scaled_rule(index, rule, by)
        return pricer.work(grown, scaled, strategy, tuple(operands), moves)

    found: list[CostTerm] = []
    for number, kernel in enumerate(work((1, 1))):
        flops, moved = _growths(work, number, degrees, pricer.mesh.size)
        found += _kernel(kernel, flops, moved, pricer)
    return found


def _growths(
    work: Callable[[Powers], tuple[Work, ...]], number: int, degrees: Powers, step: int
) -> tuple[Growth, Growth]:
    """How the arithmetic and the traffic of an operator's kernel `number` grow."""
    return (
        growth(lambda by: work(by)[number].flops, degrees, step),
        growth(lambda by: work(by)[number].traffic_bytes, degrees, step),
    )


def _kernel(kernel: Work, flops: Growth, moved: Growth, pricer: Pricer) -> Iterable[CostTerm]:
    """One kernel's time, as `cost.compute.kernel_parts` has it."""
    hardware = pricer.hardware
    peak = hardware.achieved(kernel.dtype, kernel.kind)
    rate = hardware.memory_bandwidth_bytes_s * hardware.memory_efficiency
    arithmetic = tuple(Part(f / peak, "arithmetic", *p) for p, f in sorted(flops.items()))
    memory = tuple(Part(m / rate, "memory", *p) for p, m in sorted(moved.items()))
    launch = (Part(kernel.launches * hardware.launch_s, "launch"),)
    if hardware.synchronous:
        yield CostTerm("max", (launch,))
        yield CostTerm("max", (memory, arithmetic))
    else:
        yield CostTerm("max", (memory, arithmetic, launch))


def _degrees(decided: Decided, index: int, scales: Scaling) -> Powers:
    """The greatest powers with which an operator's bytes or its arithmetic can grow."""
    folded, rule = decided.folded, decided.strategies.rules[index]
    tensors = [((index, i), meta) for i, meta in enumerate(folded.classes[index].op.results)]
    for position, meta in enumerate(folded.operand_metas(index)):
        tensors.append((folded.sources[index, position][0], meta))
    found = [scales.of(made, meta) for made, meta in tensors]
    if rule is not None:
        powers = [scales.factors.get((index, name), (0, 0)) for name, _ in rule.sizes]
        found.append((sum(p[0] for p in powers), sum(p[1] for p in powers)))
        if rule.family == "attention" and any(p[1] for p in found):
            found.append((0, DEGREE))
    batch, sequence = (max((p[i] for p in found), default=0) for i in (0, 1))
    return min(batch, DEGREE), min(sequence, DEGREE)


# --- conversions --------------------------------------------------------------------------------


def _moved(decided: Decided, pricer: Pricer, scales: Scaling) -> Iterable[Counted]:
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
                for term in _step(step, powers, pricer):
                    yield group.count, term


def _lowered(decided: Decided, pricer: Pricer, scales: Scaling) -> Iterable[Counted]:
    """The collectives inside lowerings: statistics of rows, or a number alone."""
    folded = decided.folded
    for index, cls in enumerate(folded.classes):
        strategy = decided.strategies.choices[index][decided.choice[index]]
        if not strategy.inner:
            continue
        powers = scales.of(folded.sources[index, 0][0], folded.operand_metas(index)[0])
        for step, inner in reductions(strategy, pricer):
            for term in _step(step, powers if inner.shape else (0, 0), pricer):
                yield cls.count, term


def _step(step: Step, powers: Powers, pricer: Pricer) -> Iterable[CostTerm]:
    """One collective, or one copy, of a tensor whose size grows with `powers`."""
    hardware = pricer.hardware
    if step.kind:
        size, link = pricer.axis_link(step.axis)
        options = [
            (
                Part(parts.launch_s, "launch"),
                Part(parts.latency_s, "latency"),
                Part(parts.transfer_s, "bandwidth", *powers),
            )
            for parts in collective_parts(step.kind, step.bytes, size, link)
        ]
        yield CostTerm("min", tuple(options))
    elif not step.bytes:
        yield CostTerm("max", ((Part(step.time_s, "launch"),),))
    else:
        moving = (Part(2 * step.bytes / copy_rate(hardware), "memory", *powers),)
        launch = (Part(hardware.launch_s, "launch"),)
        for options in ((moving,), (launch,)) if hardware.synchronous else ((moving, launch),):
            yield CostTerm("max", options)
