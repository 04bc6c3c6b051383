"""What if: how a plan's step time moves with the links, the batch and the sequence.

A step is a sum of terms. Each is the greatest of some sums (what a kernel is bound by) or the least
(the algorithms of a collective), and each summand is c · batch^i · sequence^j, over the rate it is
bound by. The four symbols are relative to what was planned for; what the terms leave out (another
plan for other sizes, kernels that reach other parts of the peak) stays as it was. Between two points
where a term picks another sum, the step is one rational function, which sympy solves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoshard.plan_types import Cost, CostTerm, Part, Plan

if TYPE_CHECKING:
    from sympy import Expr

SYMBOLS = ("bandwidth", "latency", "batch", "sequence")
"""Each is 1 as planned; `bandwidth=2` is links twice as fast."""
RANGE = (1 / 64, 64.0)
"""Break-evens are looked for between these multiples."""
_STEPS = 96
"""How many steps the range is searched in; two break-evens within one, 9 % apart, are not told apart."""
Values = Mapping[str, float]


@dataclass(frozen=True)
class BreakEven:
    """Where this plan and another known one take equally long, as one symbol moves.

    Attributes:
        symbol: which, of `SYMBOLS`.
        at: the multiple of its planned value.
        plan: the name of the other plan.
        beyond: "above" or "below": on which side of `at` the other plan is faster.
        step_s: what both take there.
    """

    symbol: str
    at: float
    plan: str
    beyond: str
    step_s: float


@dataclass(frozen=True)
class Sensitivity:
    """A plan's step time as a formula, beside those of the known plans.

    Attributes:
        step_s: seconds, in the symbols of `SYMBOLS`, as long as every term picks what it picks as
            planned.
        known_s: the same for each baseline, by name.
        elasticities: by symbol, d ln(step) / d ln(symbol) as planned: −0.3 for bandwidth says that
            links 1 % faster make the step 0.3 % shorter.
        break_evens: where the plan and another known one change places, by symbol, then from the
            least multiple to the greatest.
        costs: what `at` evaluates: this plan's cost by "", the baselines' by name.
    """

    step_s: Expr
    known_s: dict[str, Expr]
    elasticities: dict[str, float]
    break_evens: tuple[BreakEven, ...]
    costs: dict[str, Cost] = field(default_factory=dict, repr=False)

    def at(self, plan: str = "", **multiples: float) -> float:
        """Seconds of a step with some symbols at multiples of their planned values.

        Every term picks anew.

        Args:
            plan: a baseline's name; "" is the plan itself.
            multiples: by symbol; the others stay 1.
        """
        unknown = sorted(set(multiples) - set(SYMBOLS))
        if unknown:
            raise ValueError(f"There is no symbol {unknown[0]!r}: {', '.join(SYMBOLS)}.")
        return _seconds(self.costs[plan], multiples)

    def fastest(self, **multiples: float) -> str:
        """The fastest known plan there; "" is this plan, which wins where they tie."""
        return min(self.costs, key=lambda name: (self.at(name, **multiples), name))


def sensitivity(plan: Plan) -> Sensitivity:
    """The formulas of a plan's predicted step time, and what follows from them."""
    known = {name: cost for name, cost in plan.cost.baselines.items() if cost.terms}
    step = _formula(plan.cost, {})
    return Sensitivity(
        step,
        {name: _formula(cost, {}) for name, cost in known.items()},
        {name: _elasticity(step, name) for name in SYMBOLS},
        tuple(
            found
            for name in SYMBOLS
            for found in sorted(
                (
                    found
                    for other, cost in known.items()
                    for found in _break_evens(plan.cost, cost, name, other)
                ),
                key=lambda found: (found.at, found.plan),
            )
        ),
        {"": plan.cost, **known},
    )


# --- numbers ------------------------------------------------------------------------------------


def _seconds(cost: Cost, values: Values) -> float:
    """A step's time with symbols at multiples of their planned values."""
    return math.fsum(_least(term, values)[0] for term in cost.terms)


def _least(term: CostTerm, values: Values) -> tuple[float, int]:
    """A term's time, and which of its options it picks."""
    found = [
        (sum(_part(part, values) for part in option), index)
        for index, option in enumerate(term.options)
    ]
    return max(found) if term.pick == "max" else min(found)


def _part(part: Part, values: Values) -> float:
    seconds = part.seconds
    if part.scales_with == "bandwidth":
        seconds /= values.get("bandwidth", 1.0)
    elif part.scales_with == "latency":
        seconds *= values.get("latency", 1.0)
    if part.batch:
        seconds *= values.get("batch", 1.0) ** part.batch
    if part.sequence:
        seconds *= values.get("sequence", 1.0) ** part.sequence
    return seconds


# --- formulas -----------------------------------------------------------------------------------


def _symbol(name: str) -> Expr:
    import sympy

    return sympy.Symbol(name, positive=True)


def _formula(cost: Cost, values: Values) -> Expr:
    """A step's time as long as every term picks what it picks at `values`."""
    import sympy

    totals: dict[tuple[str, int, int], float] = {}
    for term in cost.terms:
        for part in term.options[_least(term, values)[1]]:
            key = (part.scales_with, part.batch, part.sequence)
            totals[key] = totals.get(key, 0.0) + part.seconds
    rate = {"bandwidth": 1 / _symbol("bandwidth"), "latency": _symbol("latency")}
    batch, sequence = _symbol("batch"), _symbol("sequence")
    return sympy.Add(
        *(
            seconds * rate.get(scales_with, 1) * batch**b * sequence**s
            for (scales_with, b, s), seconds in sorted(totals.items())
        )
    )


def _along(expression: Expr, name: str) -> Expr:
    """A formula in one symbol alone, the others as planned."""
    return expression.subs({_symbol(other): 1 for other in SYMBOLS if other != name})


def _elasticity(step: Expr, name: str) -> float:
    import sympy

    symbol, total = _symbol(name), _along(step, name)
    at_rest = float(total.subs(symbol, 1))
    return float(sympy.diff(total, symbol).subs(symbol, 1)) / at_rest if at_rest else 0.0


# --- break-evens --------------------------------------------------------------------------------


def _break_evens(cost: Cost, other: Cost, name: str, plan: str) -> Iterator[BreakEven]:
    """Where two plans change places as one symbol moves."""

    def ahead(at: float) -> float:
        mine = _seconds(cost, {name: at})
        gain = mine - _seconds(other, {name: at})
        return gain if abs(gain) > 1e-12 * mine else 0.0  # plans that are one but for rounding

    points = [RANGE[0] ** (1 - 2 * i / _STEPS) for i in range(_STEPS + 1)]
    gains = [(at, gain) for at in points if (gain := ahead(at))]
    for (low, before), (high, after) in itertools.pairwise(gains):
        if (before > 0) != (after > 0):
            at = _crossing(cost, other, name, low, high)
            side = "above" if after > 0 else "below"
            yield BreakEven(name, at, plan, side, _seconds(cost, {name: at}))


def _crossing(cost: Cost, other: Cost, name: str, low: float, high: float) -> float:
    """The multiple between `low` and `high` at which two costs are equal.

    The interval is halved until no term picks anew inside it; there the difference is a rational
    function, and its root is solved for.
    """
    import sympy

    sign = _seconds(cost, {name: low}) > _seconds(other, {name: low})
    while high / low > 1 + 1e-9 and _picks(cost, other, {name: low}) != _picks(
        cost, other, {name: high}
    ):
        middle = math.sqrt(low * high)
        if (_seconds(cost, {name: middle}) > _seconds(other, {name: middle})) == sign:
            low = middle
        else:
            high = middle
    middle = {name: math.sqrt(low * high)}
    difference = _along(_formula(cost, middle) - _formula(other, middle), name)
    polynomial = sympy.numer(sympy.together(difference))
    symbol = _symbol(name)
    if symbol not in polynomial.free_symbols:
        return middle[name]
    roots = [complex(root) for root in sympy.Poly(polynomial, symbol).nroots()]
    real = [r.real for r in roots if abs(r.imag) < 1e-9 and low * (1 - 1e-9) <= r.real]
    inside = [at for at in real if at <= high * (1 + 1e-9)]
    return inside[0] if inside else middle[name]


def _picks(cost: Cost, other: Cost, values: Values) -> list[int]:
    """Which option each term of both costs picks."""
    return [_least(term, values)[1] for c in (cost, other) for term in c.terms]
