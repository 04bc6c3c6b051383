"""What a reader of a plan should know beside its tables, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autoshard.cost.model import Pricer
from autoshard.placement import Shard
from autoshard.plan_types import Cost, WeightRecord
from autoshard.planner import words
from autoshard.planner.communicate import conversions
from autoshard.planner.decide import Decided

WORTH = 0.01
"""Share of a step, or of the weights, from which something is worth a sentence."""


def notes(
    decided: Decided, pricer: Pricer, cost: Cost, weights: tuple[WeightRecord, ...]
) -> tuple[str, ...]:
    """Sentences on what costs more than it may have to, and what does not fit."""
    return (
        *_noise(decided),
        *_capacity(pricer, cost),
        *_returned(decided, pricer, cost),
        *_uneven(weights, pricer.mesh.size),
    )


def _noise(decided: Decided) -> Iterator[str]:
    for cls, rule in zip(decided.folded.classes, decided.strategies.rules, strict=True):
        if rule and rule.noise:
            yield (
                f"{cls.key} normalises single elements: what it gives is their rounding error, which no "
                "split of the model would give again, so all of it is whole on every rank. Normalise "
                "more than one element, or leave the norm out."
            )


def _capacity(pricer: Pricer, cost: Cost) -> Iterator[str]:
    peak, memory = cost.memory.peak_bytes, pricer.hardware.memory_bytes
    if peak > memory:
        yield (
            f"A rank needs {words.size(peak)} at the peak, and one of {pricer.hardware.name} has "
            f"{words.size(memory)}: use more ranks, a smaller batch, or search all."
        )


def _returned(decided: Decided, pricer: Pricer, cost: Cost) -> Iterator[str]:
    """Results that are put together on every rank for nobody but the caller."""
    for found in conversions(decided):
        gathered = any(isinstance(placement, Shard) for placement in found.have)
        if found.takers_names != [words.OUTPUT] or not gathered:
            continue
        steps = pricer.conversion(found.meta, found.have, found.want)
        time_s = found.group.count * math.fsum(step.time_s for step in steps)
        if time_s > WORTH * cost.step_s:
            yield (
                f"Returning the result of {found.maker}, {list(found.meta.shape)}, whole on every rank "
                f"takes {time_s / cost.step_s:.1%} of the time: leave it out of what the model "
                "returns where nobody reads it."
            )


def _uneven(weights: tuple[WeightRecord, ...], ranks: int) -> Iterator[str]:
    """Large weights of which there is no slice for some rank."""
    total = sum(math.prod(weight.shape) for weight in weights)
    for group in dict.fromkeys(w.group for w in weights if w.reason.startswith("no dimension of")):
        alike = [weight for weight in weights if weight.group == group]
        if sum(math.prod(weight.shape) for weight in alike) > WORTH * total:
            yield (
                f"{group}, {list(alike[0].shape)}, is whole on every rank: none of its dimensions has a "
                f"slice for each of {ranks} ranks."
            )
