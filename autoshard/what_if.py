"""What if: a step's time with other links, another batch or another sequence, in plain numbers.

A step is a sum of terms. Each is the greatest of some sums (what a kernel is bound by) or the least
(the algorithms of a collective), and each summand is c · batch^i · sequence^j, over the rate it is
bound by. The four symbols are relative to what was planned for; what the terms leave out (another
plan for other sizes, kernels that reach other parts of the peak) stays as it was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoshard.plan_types import Cost, CostTerm, Part

SYMBOLS = ("bandwidth", "latency", "batch", "sequence")
"""Each is 1 as planned; `bandwidth=2` is links twice as fast."""
RANGE = (1 / 64, 64.0)
"""Break-evens are looked for between these multiples."""
_STEPS = 96
"""How many steps the range is searched in; two break-evens within one, 9 % apart, are not told apart."""
_ONE = 1e-12
"""Plans nearer than this part of a step are one, but for rounding."""
Values = Mapping[str, float]


def seconds(cost: Cost, values: Values) -> float:
    """A step's time with symbols at multiples of their planned values; every term picks anew."""
    return math.fsum(picked(term, values)[0] for term in cost.terms)


def picked(term: CostTerm, values: Values) -> tuple[float, int]:
    """A term's time, and which of its options it picks."""
    found = [
        (sum(_part(part, values) for part in option), index)
        for index, option in enumerate(term.options)
    ]
    return max(found) if term.pick == "max" else min(found)


def _part(part: Part, values: Values) -> float:
    found = part.seconds
    if part.scales_with == "bandwidth":
        found /= values.get("bandwidth", 1.0)
    elif part.scales_with == "latency":
        found *= values.get("latency", 1.0)
    if part.batch:
        found *= values.get("batch", 1.0) ** part.batch
    if part.sequence:
        found *= values.get("sequence", 1.0) ** part.sequence
    return found


def elasticity(cost: Cost, symbol: str) -> float:
    """d ln(step) / d ln(symbol) as planned."""
    parts = [p for term in cost.terms for p in term.options[picked(term, {})[1]]]
    total = math.fsum(part.seconds for part in parts)
    moved = math.fsum(part.seconds * _power(part, symbol) for part in parts)
    return moved / total if total else 0.0


def _power(part: Part, symbol: str) -> int:
    """The power of a symbol in a part."""
    if symbol in ("batch", "sequence"):
        return getattr(part, symbol)
    return (-1 if symbol == "bandwidth" else 1) if part.scales_with == symbol else 0


@dataclass(frozen=True)
class Crossing:
    """An interval in which two plans change places once, and no term of theirs picks another sum.

    Attributes:
        symbol: what moves.
        low, high: its ends, as multiples.
        beyond: "above" or "below": on which side of it the other plan is faster.
    """

    symbol: str
    low: float
    high: float
    beyond: str

    @property
    def at(self) -> float:
        """Its middle."""
        return math.sqrt(self.low * self.high)


def crossings(cost: Cost, known: Mapping[str, Cost]) -> list[tuple[str, Crossing]]:
    """Where a plan and others change places: by symbol, then from the least multiple to the greatest."""
    found = [
        (name, crossing)
        for symbol in SYMBOLS
        for name, other in known.items()
        for crossing in _crossings(cost, other, symbol)
    ]
    return sorted(found, key=lambda f: (SYMBOLS.index(f[1].symbol), f[1].at, f[0]))


def _crossings(cost: Cost, other: Cost, symbol: str) -> Iterator[Crossing]:
    points = [RANGE[0] ** (1 - 2 * i / _STEPS) for i in range(_STEPS + 1)]
    gains = [(at, gain) for at in points if (gain := _gain(cost, other, symbol, at))]
    for (low, before), (high, after) in itertools.pairwise(gains):
        if (before > 0) != (after > 0):
            beyond = "above" if after > 0 else "below"
            yield narrowed(cost, other, Crossing(symbol, low, high, beyond), 0.0)


def narrowed(cost: Cost, other: Cost, crossing: Crossing, width: float) -> Crossing:
    """The crossing's interval halved until no term picks anew inside it, and it is no wider than asked.

    Args:
        cost, other: of the two plans.
        crossing: where they change places.
        width: the greatest ratio of its ends, less 1; 0 for any.
    """
    symbol, low, high = crossing.symbol, crossing.low, crossing.high
    while high / low > 1 + max(width, 1e-9):
        if not width and _picks(cost, other, symbol, low) == _picks(cost, other, symbol, high):
            break
        middle = math.sqrt(low * high)
        if (_gain(cost, other, symbol, middle) > 0) == (crossing.beyond == "above"):
            high = middle
        else:
            low = middle
    return Crossing(symbol, low, high, crossing.beyond)


def _gain(cost: Cost, other: Cost, symbol: str, at: float) -> float:
    """By how much the other plan is faster; 0 where it is but for rounding."""
    mine = seconds(cost, {symbol: at})
    gain = mine - seconds(other, {symbol: at})
    return gain if abs(gain) > _ONE * mine else 0.0


def _picks(cost: Cost, other: Cost, symbol: str, at: float) -> list[int]:
    """Which option each term of both costs picks."""
    return [picked(term, {symbol: at})[1] for c in (cost, other) for term in c.terms]
