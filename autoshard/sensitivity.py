"""What if: how a plan's step time moves with the links, the batch and the sequence.

The step is a sum of terms c · b^i · s^j, each over the rate it is bound by, with b and s the batch and
the sequence relative to what was planned for, and bandwidth and latency relative to the profile's. It
is exact at the planned sizes and first-order around them: a kernel or collective that would change
what bounds it, or its algorithm, is priced as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoshard.plan_types import Cost, Plan

if TYPE_CHECKING:
    from sympy import Expr

SYMBOLS = ("bandwidth", "latency", "batch", "sequence")
"""Each is 1 as planned; `bandwidth=2` is links twice as fast."""
RANGE = (1 / 64, 64.0)
"""Break-evens are looked for between these multiples."""


@dataclass(frozen=True)
class BreakEven:
    """Where another known plan becomes the faster one, as one symbol moves.

    Attributes:
        symbol: which, of `SYMBOLS`.
        at: the multiple of its planned value.
        plan: the name of the other plan.
        beyond: "above" or "below": on which side of `at` the other plan is faster.
    """

    symbol: str
    at: float
    plan: str
    beyond: str


@dataclass(frozen=True)
class Sensitivity:
    """A plan's step time as a formula, beside those of the known plans.

    Attributes:
        step_s: seconds, in the symbols of `SYMBOLS`.
        known_s: the same for each baseline, by name.
        elasticities: by symbol, d ln(step) / d ln(symbol) as planned: −0.3 for bandwidth says that
            links 1 % faster make the step 0.3 % shorter.
        break_evens: where the plan stops being the fastest of those known.
    """

    step_s: Expr
    known_s: dict[str, Expr]
    elasticities: dict[str, float]
    break_evens: tuple[BreakEven, ...]

    def at(self, plan: str = "", **multiples: float) -> float:
        """Seconds of a step with some symbols at multiples of their planned values.

        Args:
            plan: a baseline's name; "" is the plan itself.
            multiples: by symbol; the others stay 1.
        """
        expression = self.known_s[plan] if plan else self.step_s
        values = dict.fromkeys(SYMBOLS, 1.0) | multiples
        return float(expression.subs({_symbol(name): value for name, value in values.items()}))


def sensitivity(plan: Plan) -> Sensitivity:
    """The formulas of a plan's predicted step time, and what follows from them."""
    step = _formula(plan.cost)
    known = {name: _formula(cost) for name, cost in plan.cost.baselines.items() if cost.terms}
    return Sensitivity(
        step,
        known,
        {name: _elasticity(step, name) for name in SYMBOLS},
        tuple(
            found
            for name in SYMBOLS
            for other, formula in known.items()
            for found in _break_evens(step, formula, name, other)
        ),
    )


def _symbol(name: str) -> Expr:
    import sympy

    return sympy.Symbol(name, positive=True)


def _formula(cost: Cost) -> Expr:
    import sympy

    rate = {"bandwidth": 1 / _symbol("bandwidth"), "latency": _symbol("latency")}
    batch, sequence = _symbol("batch"), _symbol("sequence")
    return sympy.Add(
        *(
            term.seconds
            * rate.get(term.scales_with, 1)
            * batch**term.batch
            * sequence**term.sequence
            for term in cost.terms
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


def _break_evens(step: Expr, other: Expr, name: str, plan: str) -> list[BreakEven]:
    """Where the formulas of two plans cross as one symbol moves: roots of a polynomial."""
    import sympy

    symbol = _symbol(name)
    difference = sympy.numer(sympy.together(_along(step - other, name)))
    if symbol not in difference.free_symbols:
        return []
    roots = sympy.Poly(difference, symbol).nroots()
    real = sorted(float(r) for r in roots if abs(sympy.im(r)) < 1e-9 and sympy.re(r) > 0)
    found = []
    for at in real:
        above = float(_along(other - step, name).subs(symbol, at * 1.001)) < 0
        if RANGE[0] <= at <= RANGE[1] and abs(at - 1) > 1e-9:
            found.append(BreakEven(name, at, plan, "above" if above else "below"))
    return found
