"""Solve a `Problem` with PuLP: by HiGHS, or by CBC where HiGHS is missing.

The relaxation is solved first, for it is nearly always integral; branching is left for when it is not.
"""

from __future__ import annotations

import time

from autoshard.errors import InfeasibleError, SolverError
from autoshard.ilp.backend import SOLVERS, available
from autoshard.ilp.memory_rows import MemoryRows
from autoshard.ilp.problem import PARTS, Problem, Solution
from autoshard.ilp.program import TIE, TOLERANCE, UNIT_S, Program, chosen, run, state, total

__all__ = ["SOLVERS", "TIE", "UNIT_S", "available", "solve"]

SINGLY, MOST_CUTS = 8, 9
"""How many choices that are over the budget by rounding are taken out one at a time, and in all."""
PATIENCE = 0.25
"""The share of the time in which a plan under a budget must be found, before the leanest is taken."""
LISTED = 5
"""How many of the largest contributors an error names."""


def solve(problem: Problem, *, solver: str | None = None, time_limit_s: float = 60.0) -> Solution:
    """Choose a strategy for every node at the least cost.

    Memory has a row for each moment of a step, stated only for those at which a choice would be over the
    budget: a few, as a rule.

    Args:
        problem: what to choose from.
        solver: "HiGHS" or "CBC"; None takes the first that is installed.
        time_limit_s: after this the best plan found so far is given, with its gap.

    Raises:
        InfeasibleError: nothing fits the budget.
        SolverError: no solver is installed, it failed, or it found nothing in its time.
    """
    started = time.perf_counter()
    name = available(solver)
    program = state(problem)
    rows = MemoryRows(problem, program)
    relaxed, bound, choice = _relaxed(problem, program, rows, name, time_limit_s)
    status = "optimal (the relaxation is integral)"
    cuts = 0
    while choice is None or not _fits(problem, choice):
        if choice is not None and not rows.add(choice):
            _exclude(program, rows, choice, cuts)
            cuts += 1
        left = max(1.0, time_limit_s - (time.perf_counter() - started))
        done, found = run(program, name, left * (PATIENCE if rows.stated else 1), relax=False)
        if done == "infeasible":
            relaxed = done
            break
        choice = chosen(program)
        if choice is None or cuts > MOST_CUTS:
            choice = _leanest(problem, name, time_limit_s) if rows.stated else None
            if choice is None:
                raise SolverError(
                    f"{name} found no plan in {time_limit_s:g} s.", fix="Raise time_limit_s."
                )
            status = "stopped at the time limit: the leanest plan"
            break
        status = "optimal" if done == "optimal" else "stopped at the time limit"
        if done == "optimal":
            bound = found
    if relaxed == "infeasible" or choice is None or not _fits(problem, choice):
        raise _infeasible(problem, name, time_limit_s)
    return _solution(problem, program, choice, name, status, bound, started)


def _relaxed(
    problem: Problem, program: Program, rows: MemoryRows, name: str, time_limit_s: float
) -> tuple[str, float, tuple[int, ...] | None]:
    """Solve the relaxation, with rows for the moments at which what it finds is over the budget."""
    while True:
        ended, bound = run(program, name, time_limit_s, relax=True)
        choice = chosen(program) if ended == "optimal" else None
        if choice is None or _fits(problem, choice) or not rows.add(choice):
            return ended, bound, choice


def _fits(problem: Problem, choice: tuple[int, ...]) -> bool:
    return problem.budget_bytes is None or problem.bytes(choice) <= problem.budget_bytes


def _exclude(program: Program, rows: MemoryRows, choice: tuple[int, ...], cuts: int) -> None:
    """Take out a choice that is over the budget by less than solvers' tolerances: a millionth.

    One at a time, and after a few of them whatever is so near to the budget.
    """
    if cuts >= SINGLY:
        rows.tighten(1 - 10 * TOLERANCE)
        return
    taken = [
        (variables[s], 1.0)
        for s, variables in zip(choice, program.choices, strict=True)
        if len(variables) > 1
    ]
    program.lp += total(taken) <= len(taken) - 1


def _solution(
    problem: Problem,
    program: Program,
    choice: tuple[int, ...],
    name: str,
    status: str,
    bound_s: float,
    started: float,
) -> Solution:
    objective = problem.cost_s(choice)
    ties = problem.tie(choice) * TIE * UNIT_S
    return Solution(
        choice=choice,
        solver=name,
        status=status,
        objective_s=objective,
        bound_s=min(objective, bound_s - ties),
        binaries=program.binaries,
        constraints=program.lp.numConstraints(),
        wall_s=time.perf_counter() - started,
    )


def _infeasible(problem: Problem, name: str, time_limit_s: float) -> Exception:
    """What to say when nothing fits: the least budget that would, and what takes it."""
    choice = _leanest(problem, name, time_limit_s) if problem.budget_bytes is not None else None
    if choice is None or problem.budget_bytes is None:
        return SolverError("No plan satisfies the constraints.", fix="Remove a constraint.")
    least = problem.bytes(choice)
    return InfeasibleError(
        f"No plan fits {_size(problem.budget_bytes)} a rank: "
        f"the least budget that does is {_size(least)} ({least} bytes).",
        _made_up(problem, choice),
        f"Give memory_budget={least}, use more ranks, or a smaller batch.",
        least_budget_bytes=least,
    )


def _leanest(problem: Problem, name: str, time_limit_s: float) -> tuple[int, ...] | None:
    """The choice that holds the least at its peak; None where none satisfies the constraints."""
    program = state(problem)
    rows = MemoryRows(problem, program, soft=True)
    choice: tuple[int, ...] | None = (0,) * len(problem.nodes)
    while choice is not None and rows.add(choice):
        ended, _ = run(program, name, time_limit_s, relax=False)
        choice = chosen(program) if ended != "infeasible" else None
    return choice


def _made_up(problem: Problem, choice: tuple[int, ...]) -> str:
    """What is held at a choice's peak: by what it is for, and the largest single contributors."""
    moment, _ = problem.peak(choice)
    held = [(hold, hold.count(moment) * problem.held_bytes(hold, choice)) for hold in problem.holds]
    parts = {part: sum(size for hold, size in held if hold.kind == part) for part in PARTS}
    listed = ", ".join(f"{part} {_size(size)}" for part, size in parts.items() if size)
    by_node: dict[tuple[str, str], int] = {}
    for hold, size in held:
        node = hold.node if hold.tensor < 0 else problem.tensors[hold.tensor].producer
        key = problem.nodes[node].key.partition(":")[0], hold.kind
        by_node[key] = by_node.get(key, 0) + size
    largest = sorted(by_node.items(), key=lambda item: (-item[1], item[0]))[:LISTED]
    named = "; ".join(f"{key} ({kind}): {_size(size)}" for (key, kind), size in largest)
    return f"of it {listed}; the largest contributors are {named}"


def _size(count: int) -> str:
    """Bytes in the largest unit of which there is at least one."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count} bytes"
