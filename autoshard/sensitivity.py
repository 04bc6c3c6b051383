"""What if, as formulas: a plan's step time in bandwidth, latency, batch and sequence.

`what_if` says what the symbols mean and finds where two plans change places; between two points where a
term picks another sum, the step is one rational function, which sympy differentiates and solves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoshard.plan_types import Cost, Plan
from autoshard.what_if import SYMBOLS, Crossing, Values, crossings, picked, seconds

if TYPE_CHECKING:
    from sympy import Expr


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
        return seconds(self.costs[plan], multiples)

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
            _break_even(plan.cost, known[other], crossing, other)
            for other, crossing in crossings(plan.cost, known)
        ),
        {"": plan.cost, **known},
    )


# --- formulas -----------------------------------------------------------------------------------


def _symbol(name: str) -> Expr:
    import sympy

    return sympy.Symbol(name, positive=True)


def _formula(cost: Cost, values: Values) -> Expr:
    """A step's time as long as every term picks what it picks at `values`."""
    import sympy

    totals: dict[tuple[str, int, int], float] = {}
    for term in cost.terms:
        for part in term.options[picked(term, values)[1]]:
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


def _break_even(cost: Cost, other: Cost, crossing: Crossing, plan: str) -> BreakEven:
    """The root of the difference of two formulas, where both are smooth and cross once."""
    import sympy

    name, low, high = crossing.symbol, crossing.low, crossing.high
    middle = {name: math.sqrt(low * high)}
    difference = _along(_formula(cost, middle) - _formula(other, middle), name)
    polynomial, symbol = sympy.numer(sympy.together(difference)), _symbol(name)
    at = middle[name]
    if symbol in polynomial.free_symbols:
        roots = [complex(root) for root in sympy.Poly(polynomial, symbol).nroots()]
        real = [root.real for root in roots if abs(root.imag) < 1e-9 * abs(root)]
        inside = [r for r in real if low * (1 - 1e-9) <= r <= high * (1 + 1e-9)]
        at = inside[0] if inside else at
    return BreakEven(name, at, plan, crossing.beyond, seconds(cost, {name: at}))
