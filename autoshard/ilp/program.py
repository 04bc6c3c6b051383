"""State a `Problem` as an integer linear program.

Each strategy is a binary, each tensor's way from a state to a state a flow in [0, 1] whose row sums
are the producer's choice and whose column sums the consumer's. So stated, the relaxation is nearly always
integral.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pulp

from autoshard.errors import SolverError
from autoshard.ilp.backend import backend
from autoshard.ilp.problem import Problem, Tensor

UNIT_S = 1e-6
"""The program is stated in microseconds: solvers' tolerances are absolute."""
TIE = 1e-5
"""Weight of a tie-break, in units: far below any real cost, above the solvers' tolerances."""
TOLERANCE = 1e-6
"""By how much solvers let a variable be off, and a row."""

Variable = pulp.LpVariable | int
"""A variable of the program, or the constant 1 where there is no choice."""
Term = tuple[Variable, float]
Pair = tuple[int, int]


@dataclass
class Program:
    """The PuLP program while it is stated, and its variables.

    Attributes:
        lp: the program.
        choices: for each node, a variable for each strategy.
        terms: of the objective.
        binaries: how many.
        flows: for each (tensor, use, (have, want)), the flow.
        paid: for each (tensor, (have, want)), whether that conversion is made.
    """

    lp: pulp.LpProblem
    choices: list[list[Variable]] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    binaries: int = 0
    flows: dict[tuple[int, int, Pair], pulp.LpVariable] = field(default_factory=dict)
    paid: dict[tuple[int, Pair], pulp.LpVariable] = field(default_factory=dict)


def state(problem: Problem) -> Program:
    """The program of a problem, without memory."""
    program = Program(pulp.LpProblem("autoshard", pulp.LpMinimize))
    for index, node in enumerate(problem.nodes):
        count = len(node.costs_s)
        variables: list[Variable] = [1]
        if count > 1:
            variables = [
                program.lp.add_variable(f"x_{index}_{s}", 0, 1, pulp.LpInteger)
                for s in range(count)
            ]
            program.lp += total([(v, 1.0) for v in variables]) == 1
            program.binaries += count
        program.choices.append(variables)
        for s, variable in enumerate(variables):
            weight = node.count * (node.costs_s[s] / UNIT_S + TIE * node.ties[s])
            program.terms.append((variable, weight))
    for index, tensor in enumerate(problem.tensors):
        _flows(program, index, tensor)
    program.lp.setObjective(total(program.terms))
    return program


def total(terms: Sequence[Term]) -> pulp.LpAffineExpression:
    """The sum of terms, each variable once."""
    constant = sum(weight for variable, weight in terms if isinstance(variable, int))
    weights: dict[pulp.LpVariable, float] = {}
    for variable, weight in terms:
        if isinstance(variable, pulp.LpVariable):
            weights[variable] = weights.get(variable, 0.0) + weight
    return pulp.LpAffineExpression(weights, constant)


def _flows(program: Program, index: int, tensor: Tensor) -> None:
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
        program.flows |= {(index, number, pair): flow for pair, flow in flows.items()}
        for have, made in haves.items():
            out = [(flow, 1.0) for pair, flow in flows.items() if pair[0] == have]
            program.lp += total(out) == total([(v, 1.0) for v in made])
        for want, taken in wants.items():
            into = [(flow, 1.0) for pair, flow in flows.items() if pair[1] == want]
            program.lp += total(into) == total([(v, 1.0) for v in taken])
        _pay(program, index, tensor, flows, paid)
    for pair, variable in paid.items():
        program.paid[index, pair] = variable
        weight = tensor.count * (tensor.costs_s[pair] / UNIT_S + TIE * tensor.ties[pair])
        program.terms.append((variable, weight))


def _pay(
    program: Program,
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
        program.lp += total([(paid[pair], 1.0), (flow, -1.0)]) >= 0


def _by_state(variables: list[Variable], states: tuple[int, ...]) -> dict[int, list[Variable]]:
    found: dict[int, list[Variable]] = {}
    for variable, state in zip(variables, states, strict=True):
        found.setdefault(state, []).append(variable)
    return found


def run(program: Program, name: str, time_limit_s: float, *, relax: bool) -> tuple[str, float]:
    """Solve; how it ended ("optimal", "infeasible", "stopped") and the objective in seconds."""
    try:
        program.lp.solve(backend(name, time_limit_s, relax=relax))
    except pulp.PulpSolverError as error:
        raise SolverError(f"{name} failed: {error}", fix="Try the other solver.") from error
    if program.lp.status == pulp.LpStatusInfeasible:
        return "infeasible", 0.0
    ended = "optimal" if program.lp.sol_status == pulp.LpSolutionOptimal else "stopped"
    value = program.lp.objective.value() if program.lp.objective is not None else None
    return ended, float(value or 0.0) * UNIT_S


def chosen(program: Program) -> tuple[int, ...] | None:
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
