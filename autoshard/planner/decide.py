"""Decide how each operator runs: solve for it, or read it from a plan."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoshard.cost.hardware import Hardware, load_hardware
from autoshard.cost.model import Pricer
from autoshard.cost.optimizer import ADAMW, Optimizer
from autoshard.errors import PlanError
from autoshard.fold import Folded
from autoshard.graph import OpGraph
from autoshard.ilp.problem import Problem, Solution
from autoshard.ilp.solve import solve
from autoshard.mesh import Mesh
from autoshard.plan_types import Plan
from autoshard.planner.constrain import constrained, labels
from autoshard.planner.price import price
from autoshard.planner.survey import Survey, survey_graph
from autoshard.strategies import Strategies, Strategy, derive


@dataclass(frozen=True)
class Options:
    """What a plan is made for.

    Attributes:
        mesh, hardware, mode, search, memory_budget_bytes: as `autoshard.plan` takes them.
        constraints: (glob of FQNs, split) pairs.
        uniform: whether repeated layers share their decisions.
        solver, time_limit_s: see `autoshard.ilp.solve`.
        optimizer: whose memory a training step needs.
    """

    mesh: Mesh
    hardware: Hardware
    mode: str = "train"
    search: str = "tensor"
    memory_budget_bytes: int | None = None
    constraints: tuple[tuple[str, str], ...] = ()
    uniform: bool = True
    solver: str | None = None
    time_limit_s: float = 60.0
    optimizer: Optimizer = ADAMW

    @property
    def pricer(self) -> Pricer:
        """Prices for these options."""
        return Pricer(self.hardware, self.mesh, self.mode == "train", self.optimizer)


@dataclass(frozen=True)
class Decided:
    """A strategy for every class of a graph.

    Attributes:
        strategies: what could be chosen.
        choice: for each class, the index of the strategy chosen.
        problem: the prices, where it was solved for.
        solution: how it was solved, where it was.
    """

    strategies: Strategies
    choice: tuple[int, ...]
    problem: Problem | None = None
    solution: Solution | None = None

    @property
    def folded(self) -> Folded:
        """The classes."""
        return self.strategies.folded

    def strategy(self, name: str) -> Strategy:
        """The strategy of the operator `name`."""
        index = self.folded.class_of[name]
        return self.strategies.choices[index][self.choice[index]]


def decide(graph: OpGraph, options: Options, survey: Survey | None = None) -> Decided:
    """Choose every operator's strategy at the least predicted time of a step.

    Args:
        graph: what was captured.
        options: what to plan for.
        survey: of the same graph, where there is one already.

    Raises:
        ConstraintError: a constraint matches no parameter, or asks for what cannot be.
        InfeasibleError: nothing fits the memory budget.
        SolverError: the solver failed.
    """
    known = survey or surveyed(graph, options)
    found = derive(known.folded, options.mesh, search=options.search, rules=known.rules)
    strategies = constrained(found, options.constraints)
    problem = price(strategies, options.pricer, known, options.memory_budget_bytes)
    solution = solve(problem, solver=options.solver, time_limit_s=options.time_limit_s)
    return Decided(strategies, solution.choice, problem, solution)


def surveyed(graph: OpGraph, options: Options) -> Survey:
    """What planning for these options needs to know of the graph, whatever the search."""
    return survey_graph(
        graph,
        uniform=options.uniform,
        labels=labels(graph, options.constraints),
        fused=options.hardware.fused_pointwise,
        train=options.mode == "train",
    )


def apply_plan(graph: OpGraph, plan: Plan) -> Decided:
    """Read every operator's strategy from a plan; no solver runs.

    Each is checked against the rules again, so that a plan changed by hand is sound or refused.

    Raises:
        PlanError: the plan is for another model, other shapes, or names a strategy that is not one.
    """
    return replace(replay(graph, plan, load_hardware("ideal"))[1], problem=None)


def replay(graph: OpGraph, plan: Plan, hardware: Hardware) -> tuple[Survey, Decided]:
    """As `apply_plan`, with what is known of the graph, and the prices on `hardware`."""
    if graph.fingerprint != plan.fingerprint:
        raise PlanError(
            f"The plan is for another model or other input shapes: it was made for {plan.model} with "
            f"{', '.join(plan.inputs)} (graph {plan.fingerprint}), this is {graph.model} "
            f"(graph {graph.fingerprint}).",
            fix="Plan again for this model and these example inputs.",
        )
    known, strategies = _replayed(graph, plan, fused=hardware.fused_pointwise)
    wanted = {choice.key: choice.strategy for choice in plan.choices}
    _known(wanted, [cls.key for cls in strategies.folded.classes])
    choice = []
    for cls, options in zip(strategies.folded.classes, strategies.choices, strict=True):
        texts = [str(strategy) for strategy in options]
        text = wanted.get(cls.key, texts[0] if len(texts) == 1 else None)
        if text not in texts:
            raise PlanError(
                f"The plan runs {cls.key} as '{text}', which is not one of its sound strategies.",
                fix=f"It can run as {'; '.join(texts)}. Plan again rather than edit a plan.",
            )
        choice.append(texts.index(text))
    pricer = Pricer(hardware, plan.mesh, plan.mode == "train", plan.optimizer)
    problem = price(strategies, pricer, known, plan.memory_budget_bytes)
    decided = Decided(strategies, tuple(choice), problem)
    if not problem.possible(decided.choice):
        raise PlanError("The plan's strategies do not fit together.", fix="Plan again.")
    return known, decided


def _known(wanted: Iterable[str], keys: list[str]) -> None:
    """Check that every operator a plan names is one of the model's."""
    for key in sorted(set(wanted) - set(keys)):
        near = difflib.get_close_matches(key, keys, 3, 0.3)
        raise PlanError(
            "A key of the plan matches no operator of the model.",
            key,
            f"The nearest are {', '.join(near) or 'none'}. Plan again rather than edit a plan.",
        )


def follow_plan(graph: OpGraph, plan: Plan) -> Decided:
    """As `apply_plan`, for a graph of the same model in another dtype.

    There a cast may be needed that the plan's graph has no use for: what the plan does not say is solved
    for, around what it does.
    """
    known, strategies = _replayed(graph, plan)
    wanted = {choice.key: choice.strategy for choice in plan.choices}
    kept = tuple(
        tuple(s for s in options if str(s) == wanted.get(cls.key, str(s))) or options
        for cls, options in zip(strategies.folded.classes, strategies.choices, strict=True)
    )
    pinned = replace(strategies, choices=kept)
    pricer = Pricer(load_hardware("ideal"), plan.mesh, train=False)
    solution = solve(price(pinned, pricer, known, None))
    return Decided(pinned, solution.choice)


def _replayed(graph: OpGraph, plan: Plan, *, fused: bool = True) -> tuple[Survey, Strategies]:
    """What could be chosen where a plan was made."""
    marks = labels(graph, plan.constraints)
    known = survey_graph(
        graph, uniform=plan.uniform, labels=marks, fused=fused, train=plan.mode == "train"
    )
    found = derive(known.folded, plan.mesh, search=plan.search, rules=known.rules)
    return known, constrained(found, plan.constraints)
