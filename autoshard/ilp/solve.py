"""Solve a `Problem` with PuLP: by HiGHS, or by CBC where HiGHS is missing.

Each strategy is a binary, each tensor's way from a state to a state a flow in [0, 1] whose row sums
are the producer's choice and whose column sums are the consumer's. So stated, the relaxation is nearly
always integral: it is solved first, and branching is left for when it is not.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pulp

from autoshard.errors import InfeasibleError, SolverError
from autoshard.ilp.problem import Problem, Solution, Tensor

SOLVERS = ("HiGHS", "CBC")
UNIT_S = 1e-6
"""The program is stated in microseconds: solvers' tolerances are absolute."""
TIE = 1e-5
"""Weight of a tie-break, in units: far below any real cost, above the solvers' tolerances."""


TOLERANCE = 1e-6
"""By how much solvers let a variable be off, and a row."""
SINGLY, MOST_CUTS = 8, 9
"""How many choices that are over the budget by rounding are taken out one at a time, and in all."""

Variable = pulp.LpVariable | int
"""A variable of the program, or the constant 1 where there is no choice."""
Term = tuple[Variable, float]


@dataclass
class _Program:
    """The PuLP program while it is stated, and its variables."""

    lp: pulp.LpProblem
    choices: list[list[Variable]] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    binaries: int = 0


def solve(problem: Problem, *, solver: str | None = None, time_limit_s: float = 60.0) -> Solution:
    """Choose a strategy for every node at the least cost.

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
    program = _state(problem)
    relaxed, bound = _run(program, name, time_limit_s, relax=True)
    if relaxed == "infeasible":
        raise _infeasible(problem, name, time_limit_s)
    choice = _choice(program) if relaxed == "optimal" else None
    status = "optimal (the relaxation is integral)"
    cuts = 0
    while choice is None or not _fits(problem, choice):
        if choice is not None:
            _exclude(problem, program, choice, cuts)
            cuts += 1
        left = max(1.0, time_limit_s - (time.perf_counter() - started))
        done, found = _run(program, name, left, relax=False)
        if done == "infeasible":
            raise _infeasible(problem, name, time_limit_s)
        choice = _choice(program)
        if choice is None or cuts > MOST_CUTS:
            raise SolverError(
                f"{name} found no plan in {time_limit_s:g} s.", fix="Raise time_limit_s."
            )
        status = "optimal" if done == "optimal" else "stopped at the time limit"
        if done == "optimal":
            bound = found
    return _solution(problem, program, choice, name, status, bound, started)


def _fits(problem: Problem, choice: tuple[int, ...]) -> bool:
    return problem.budget_bytes is None or problem.bytes(choice) <= problem.budget_bytes


def _exclude(problem: Problem, program: _Program, choice: tuple[int, ...], cuts: int) -> None:
    """Take out a choice that is over the budget by less than solvers' tolerances: a millionth.

    One at a time, and after a few of them whatever is so near to the budget.
    """
    assert problem.budget_bytes is not None
    if cuts >= SINGLY:
        unit = _unit_bytes(problem)
        least = problem.budget_bytes * (1 - 10 * TOLERANCE) / unit
        program.lp += _memory(problem, program, unit) <= least
        return
    taken = [
        (variables[s], 1.0)
        for s, variables in zip(choice, program.choices, strict=True)
        if len(variables) > 1
    ]
    program.lp += _sum(taken) <= len(taken) - 1


def available(solver: str | None = None) -> str:
    """The solver to use.

    Raises:
        SolverError: `solver` is unknown or not installed, or none is.
    """
    if solver is not None and solver not in SOLVERS:
        raise SolverError(
            f"There is no solver '{solver}'.", fix=f"Use one of {', '.join(SOLVERS)}."
        )
    for name in (solver,) if solver else SOLVERS:
        if _backend(name, 1.0).available():
            return name
    raise SolverError(
        f"{solver or 'No solver'} is not installed.", fix="Install one: pip install highspy."
    )


class _HiGHS(pulp.HiGHS):
    """HiGHS without the banner that it prints as it is made, before any option can stop it."""

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        with _stdout_closed():
            super().createAndConfigureSolver(lp)


@contextlib.contextmanager
def _stdout_closed() -> Iterator[None]:
    """A block in which what native code writes to standard output is dropped."""
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def _backend(name: str, time_limit_s: float, *, relax: bool = False) -> pulp.LpSolver:
    common = {
        "msg": False,
        "timeLimit": time_limit_s,
        "threads": 1,
        "gapRel": 1e-9,
        "mip": not relax,
    }
    if name == "HiGHS":
        return _HiGHS(**common, random_seed=0, solver="simplex" if relax else "choose")
    with warnings.catch_warnings():  # PuLP 3 ships CBC, and says that PuLP 4 will not
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(**common, options=["RandomS 1"])


def _state(problem: Problem) -> _Program:
    program = _Program(pulp.LpProblem("autoshard", pulp.LpMinimize))
    too_much = _unaffordable(problem)
    for index, node in enumerate(problem.nodes):
        count = len(node.costs_s)
        variables: list[Variable] = [1]
        if count > 1:
            variables = [
                program.lp.add_variable(
                    f"x_{index}_{s}", 0, int((index, s) not in too_much), pulp.LpInteger
                )
                for s in range(count)
            ]
            program.lp += _sum([(v, 1.0) for v in variables]) == 1
            program.binaries += count
        program.choices.append(variables)
        for s, variable in enumerate(variables):
            weight = node.count * (node.costs_s[s] / UNIT_S + TIE * node.ties[s])
            program.terms.append((variable, weight))
    for index, tensor in enumerate(problem.tensors):
        _flows(program, index, tensor)
    if problem.budget_bytes is not None:
        unit = _unit_bytes(problem)
        # Half a byte more than the budget, for sums of bytes in floats that are the budget exactly.
        program.lp += _memory(problem, program, unit) <= (problem.budget_bytes + 0.5) / unit
    program.lp.setObjective(_sum(program.terms))
    return program


def _unaffordable(problem: Problem) -> set[tuple[int, int]]:
    """The (node, strategy) that the budget forbids whatever all others choose.

    Without them no number of the memory row is far above the budget, which solvers would round by.
    """
    if problem.budget_bytes is None:
        return set()
    least = sum(node.count * min(node.bytes) for node in problem.nodes)
    transient = max((min(node.transient_bytes) for node in problem.nodes), default=0)
    return {
        (index, s)
        for index, node in enumerate(problem.nodes)
        for s, kept in enumerate(node.bytes)
        if least + node.count * (kept - min(node.bytes)) + max(transient, node.transient_bytes[s])
        > problem.budget_bytes
    }


def _unit_bytes(problem: Problem) -> float:
    """The unit of the memory row: so large that its numbers are below a few millions, and so small that
    solvers' tolerances, 1e-6 in it, are far below a byte.
    """
    least = sum(node.count * min(node.bytes) for node in problem.nodes)
    return max(1.0, max(least, problem.budget_bytes or 0) / 1e6)


def _memory(problem: Problem, program: _Program, unit: float) -> pulp.LpAffineExpression:
    """The memory row in units of bytes: what every node keeps, and the largest transient."""
    largest = program.lp.add_variable(f"transient_{program.lp.numConstraints()}", 0)
    kept: list[Term] = [(largest, 1.0)]
    too_much = _unaffordable(problem)
    for index, (node, variables) in enumerate(zip(problem.nodes, program.choices, strict=True)):
        possible = [(s, v) for s, v in enumerate(variables) if (index, s) not in too_much]
        kept += [(v, node.count * node.bytes[s] / unit) for s, v in possible if node.bytes[s]]
        if any(node.transient_bytes):
            used = [(v, -node.transient_bytes[s] / unit) for s, v in possible]
            program.lp += _sum([(largest, 1.0), *used]) >= 0
    return _sum(kept)


def _sum(terms: Sequence[Term]) -> pulp.LpAffineExpression:
    constant = sum(weight for variable, weight in terms if isinstance(variable, int))
    total: dict[pulp.LpVariable, float] = {}
    for variable, weight in terms:
        if isinstance(variable, pulp.LpVariable):
            total[variable] = total.get(variable, 0.0) + weight
    return pulp.LpAffineExpression(total, constant)


def _flows(program: _Program, index: int, tensor: Tensor) -> None:
    """The flows of one tensor to each of its uses, and its conversions, each paid once."""
    haves = _by_state(program.choices[tensor.producer], tensor.haves)
    paid: dict[tuple[int, int], pulp.LpVariable] = {}
    for number, use in enumerate(tensor.uses):
        wants = _by_state(program.choices[use.node], use.wants)
        flows = {
            pair: program.lp.add_variable(f"f_{index}_{number}_{pair[0]}_{pair[1]}", 0, 1)
            for pair in sorted(use.pairs)
            if pair[0] in haves and pair[1] in wants
        }
        for have, made in haves.items():
            out = [(flow, 1.0) for pair, flow in flows.items() if pair[0] == have]
            program.lp += _sum(out) == _sum([(v, 1.0) for v in made])
        for want, taken in wants.items():
            into = [(flow, 1.0) for pair, flow in flows.items() if pair[1] == want]
            program.lp += _sum(into) == _sum([(v, 1.0) for v in taken])
        _pay(program, index, tensor, flows, paid)
    for pair, variable in paid.items():
        weight = tensor.count * (tensor.costs_s[pair] / UNIT_S + TIE * tensor.ties[pair])
        program.terms.append((variable, weight))


def _pay(
    program: _Program,
    index: int,
    tensor: Tensor,
    flows: dict[tuple[int, int], pulp.LpVariable],
    paid: dict[tuple[int, int], pulp.LpVariable],
) -> None:
    """One variable a conversion, at least as great as every flow through it."""
    for pair, flow in flows.items():
        if pair not in tensor.costs_s:
            continue
        if len(tensor.uses) == 1:
            paid[pair] = flow
            continue
        if pair not in paid:
            paid[pair] = program.lp.add_variable(f"c_{index}_{pair[0]}_{pair[1]}", 0, 1)
        program.lp += _sum([(paid[pair], 1.0), (flow, -1.0)]) >= 0


def _by_state(variables: list[Variable], states: tuple[int, ...]) -> dict[int, list[Variable]]:
    found: dict[int, list[Variable]] = {}
    for variable, state in zip(variables, states, strict=True):
        found.setdefault(state, []).append(variable)
    return found


def _run(program: _Program, name: str, time_limit_s: float, *, relax: bool) -> tuple[str, float]:
    """Solve; how it ended ("optimal", "infeasible", "stopped") and the objective in seconds."""
    try:
        program.lp.solve(_backend(name, time_limit_s, relax=relax))
    except pulp.PulpSolverError as error:
        raise SolverError(f"{name} failed: {error}", fix="Try the other solver.") from error
    if program.lp.status == pulp.LpStatusInfeasible:
        return "infeasible", 0.0
    ended = "optimal" if program.lp.sol_status == pulp.LpSolutionOptimal else "stopped"
    value = program.lp.objective.value() if program.lp.objective is not None else None
    return ended, float(value or 0.0) * UNIT_S


def _choice(program: _Program) -> tuple[int, ...] | None:
    """The strategies chosen, or None where some binary is not integral."""
    found = []
    for variables in program.choices:
        if len(variables) == 1:
            found.append(0)
            continue
        values = [float(v.value() or 0.0) for v in variables if isinstance(v, pulp.LpVariable)]
        if max(values) < 1 - TOLERANCE:
            return None
        found.append(values.index(max(values)))
    return tuple(found)


def _solution(
    problem: Problem,
    program: _Program,
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
    if problem.budget_bytes is None:
        return SolverError("No plan satisfies the constraints.", fix="Remove a constraint.")
    unbounded = Problem(problem.nodes, problem.tensors, None)
    program = _state(unbounded)
    program.lp.setObjective(_memory(unbounded, program, _unit_bytes(unbounded)))
    ended, _ = _run(program, name, time_limit_s, relax=False)
    choice = _choice(program)
    if ended == "infeasible" or choice is None:
        return SolverError("No plan satisfies the constraints.", fix="Remove a constraint.")
    least = problem.bytes(choice)
    kept = [(n.count * n.bytes[s], n) for n, s in zip(problem.nodes, choice, strict=True)]
    largest = sorted(kept, key=lambda item: (-item[0], item[1].key))[:5]
    listed = "; ".join(
        f"{n.key.partition(chr(58))[0]} ×{n.count}: {_size(size)}" for size, n in largest
    )
    return InfeasibleError(
        f"No plan fits {_size(problem.budget_bytes)} a rank: "
        f"the least budget that does is {_size(least)} ({least} bytes).",
        f"the largest contributors are {listed}",
        f"Give memory_budget={least}, use more ranks, or a smaller batch.",
        least_budget_bytes=least,
    )


def _size(count: int) -> str:
    """Bytes in the largest unit of which there is at least one."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count} bytes"
