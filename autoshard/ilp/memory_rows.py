"""The memory rows of the integer program: at each moment, what is held is at most the budget.

A step has thousands of moments, and at most of them memory is never short. So a row is stated when a
choice turns out to be over the budget at its moment, and the program solved again: what is found at last
keeps all of them.
"""

from __future__ import annotations

import pulp

from autoshard.ilp.problem import Hold, Problem
from autoshard.ilp.program import Program, Term, total


class MemoryRows:
    """The rows that are stated so far.

    `soft` adds a variable for the budget, and makes it the objective.
    """

    def __init__(self, problem: Problem, program: Program, *, soft: bool = False) -> None:
        self._problem = problem
        self._program = program
        self._rows: dict[int, pulp.LpAffineExpression] = {}
        self._needs: dict[tuple, pulp.LpVariable] = {}
        self._limit: pulp.LpVariable | float = 0.0
        self._unit = 1.0
        if soft or problem.budget_bytes is not None:
            self._unit = _unit_bytes(problem)
            # Half a byte more than the budget, for sums of bytes in floats that are the budget exactly.
            self._limit = self._budget() + 0.5 / self._unit
        if soft:
            self._limit = program.lp.add_variable("budget", 0)
            program.lp.setObjective(total([(self._limit, 1.0)]))

    @property
    def stated(self) -> bool:
        """Whether there are any."""
        return bool(self._rows)

    def _budget(self) -> float:
        """What may be held, without the allocator's slack, in units."""
        return (self._problem.budget_bytes or 0) / (1 + self._problem.slack) / self._unit

    def add(self, choice: tuple[int, ...]) -> bool:
        """State the row of the moment at which a choice holds most; False where it is stated already."""
        moment, _ = self._problem.peak(choice)
        if moment in self._rows:
            return False
        row = self._row(moment)
        self._rows[moment] = row
        self._program.lp += row - self._limit <= 0
        return True

    def tighten(self, share: float) -> None:
        """Allow only so much of the budget at every moment with a row."""
        for row in self._rows.values():
            self._program.lp += row <= self._budget() * share

    def _row(self, moment: int) -> pulp.LpAffineExpression:
        terms: list[Term] = []
        nodes: dict[int, list[float]] = {}
        for hold in self._problem.holds:
            count = hold.count(moment)
            if not count:
                continue
            if hold.tensor >= 0:
                for pairs, size in hold.copies:
                    weight = count * size / self._unit
                    terms += [(v, weight) for v in self._needed(hold, pairs)]
                continue
            sizes = nodes.setdefault(hold.node, [0.0] * len(hold.sizes))
            nodes[hold.node] = [
                held + count * size / self._unit
                for held, size in zip(sizes, hold.sizes, strict=True)
            ]
        self._forbid(nodes)
        for node, sizes in nodes.items():
            variables = self._program.choices[node]
            terms += [(v, size) for v, size in zip(variables, sizes, strict=True) if size]
        return total(terms)

    def _forbid(self, nodes: dict[int, list[float]]) -> None:
        """Take out the strategies that the budget forbids whatever all others choose.

        Without them no number of a row is far above the budget, which solvers would round by.
        """
        if not isinstance(self._limit, float):
            return
        least = sum(min(sizes) for sizes in nodes.values())
        for node, sizes in nodes.items():
            for size, variable in zip(sizes, self._program.choices[node], strict=True):
                over = least + size - min(sizes) > self._limit
                if over and isinstance(variable, pulp.LpVariable):
                    variable.upBound = 0

    def _needed(self, hold: Hold, pairs: frozenset[tuple[int, int]]) -> list[pulp.LpVariable]:
        """Variables whose sum is whether any of the uses takes the tensor by one of the pairs."""
        taken = [found for use in hold.uses if (found := self._flows(hold.tensor, use, pairs))]
        spared = [flow for use in hold.unless for flow in self._flows(hold.tensor, use, pairs)]
        if len(taken) <= 1 and not spared:
            return taken[0] if taken else []
        every = len(hold.uses) == len(self._problem.tensors[hold.tensor].uses)
        if (
            len(pairs) == 1
            and every
            and not spared
            and (hold.tensor, min(pairs)) in self._program.paid
        ):
            return [self._program.paid[hold.tensor, min(pairs)]]
        key = (hold.tensor, hold.uses, hold.unless, pairs)
        if key not in self._needs:
            self._needs[key] = self._program.lp.add_variable(f"held_{len(self._needs)}", 0, 1)
            for found in taken:
                less = [*((f, -1.0) for f in found), *((f, 1.0) for f in spared)]
                self._program.lp += total([(self._needs[key], 1.0), *less]) >= 0
        return [self._needs[key]]

    def _flows(
        self, tensor: int, use: int, pairs: frozenset[tuple[int, int]]
    ) -> list[pulp.LpVariable]:
        found = [self._program.flows.get((tensor, use, pair)) for pair in sorted(pairs)]
        return [flow for flow in found if flow is not None]


def _unit_bytes(problem: Problem) -> float:
    """The unit of the rows: so large that their numbers are below a few millions, and so small that
    solvers' tolerances, 1e-6 in it, are far below a byte.
    """
    whole = problem.bytes((0,) * len(problem.nodes))
    return max(1.0, max(whole, problem.budget_bytes or 0) / 1e6)
