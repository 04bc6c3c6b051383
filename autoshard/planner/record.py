"""Tell of a decision: the records that make up a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from autoshard.cost.model import Pricer
from autoshard.fold import star
from autoshard.graph import OpGraph
from autoshard.ilp.problem import PARTS
from autoshard.placement import I, local_shape
from autoshard.plan_types import (
    Choice,
    Cost,
    FallbackRecord,
    Memory,
    Plan,
    SolverRecord,
    WeightRecord,
)
from autoshard.planner.communicate import collectives
from autoshard.planner.constrain import labels
from autoshard.planner.decide import Decided, Options
from autoshard.planner.lowered import lowered_steps
from autoshard.planner.memory import moment_in_words
from autoshard.planner.notes import notes
from autoshard.planner.price import price
from autoshard.planner.reasons import why
from autoshard.planner.roles import role
from autoshard.planner.scaling import Scaling, scaling
from autoshard.planner.survey import Survey
from autoshard.planner.terms import cost_terms
from autoshard.strategies import derive


def record(survey: Survey, decided: Decided, options: Options, others: dict[str, Decided]) -> Plan:
    """The plan of a decision.

    Args:
        survey: of the whole graph.
        decided: a strategy for each of its classes, with the problem and its solution.
        options: what it was made for.
        others: decisions to show beside it, by name; "replicated" is added.
    """
    problem, solution = decided.problem, decided.solution
    assert problem is not None
    assert solution is not None
    graph, pricer, scales = survey.folded.graph, options.pricer, scaling(survey)
    found = cost(decided, pricer, survey, scales)
    baselines = {
        name: cost(other, pricer, survey, scales)
        for name, other in (replicated(decided, survey, pricer) | others).items()
    }
    pinned = frozenset(labels(graph, options.constraints))
    weights = tuple(_weights(graph, decided, pricer, pinned))
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        mesh=options.mesh,
        hardware=options.hardware.name,
        mode=options.mode,
        search=options.search,
        memory_budget_bytes=options.memory_budget_bytes,
        weights=weights,
        collectives=collectives(decided, pricer),
        fallbacks=tuple(fallbacks(decided)),
        cost=replace(found, baselines=baselines),
        solver=SolverRecord(
            solution.solver,
            solution.status,
            solution.objective_s,
            solution.bound_s,
            solution.gap,
            solution.binaries,
            solution.constraints,
            solution.wall_s,
        ),
        choices=tuple(_choices(decided)),
        notes=notes(decided, pricer, found, weights),
        inputs=tuple(_inputs(graph)),
        uniform=options.uniform,
        constraints=options.constraints,
        hardware_hash=options.hardware.hash,
        optimizer=options.optimizer,
    )


def replicated(decided: Decided, survey: Survey, pricer: Pricer) -> dict[str, Decided]:
    """Everything whole on every rank, to compare with: also where a constraint or plan forbids it."""
    whole = Decided(decided.strategies, (0,) * len(decided.choice), decided.problem)
    stored = [whole.strategy(op.name).results[0] for op in decided.folded.graph.weights]
    if any(p != I for layout in stored for p in layout):
        free = derive(survey.folded, pricer.mesh, search="tensor", rules=survey.rules)
        problem = price(free, pricer, survey, None)
        whole = Decided(free, whole.choice, problem)
    return {"replicated": whole}


def _inputs(graph: OpGraph) -> Iterable[str]:
    for op in graph.ops:
        if op.kind == "input" and op.results and op.results[0]:
            yield f"{op.target} {op.results[0].dtype}[{', '.join(map(str, op.results[0].shape))}]"


def _choices(decided: Decided) -> Iterable[Choice]:
    """The strategies of the classes that had a choice."""
    for index, cls in enumerate(decided.folded.classes):
        found = decided.strategies.choices[index]
        if len(found) > 1:
            yield Choice(cls.key, cls.count, str(found[decided.choice[index]]))


# --- weights ------------------------------------------------------------------------------------


def _weights(
    graph: OpGraph, decided: Decided, pricer: Pricer, pinned: frozenset[str]
) -> Iterable[WeightRecord]:
    told: dict[int, tuple[str, str]] = {}
    for op in graph.weights:
        index = decided.folded.class_of[op.name]
        layout, meta = decided.strategy(op.name).results[0], op.results[0]
        assert meta is not None
        if index not in told:
            split = role(decided.strategies, index, layout[0], decided.choice)
            told[index] = split, why(decided, pricer, op, split, pinned=op.name in pinned)
        split, reason = told[index]
        yield WeightRecord(
            fqns=op.fqns,
            shape=meta.shape,
            dtype=meta.dtype,
            split=split,
            placements=layout,
            local_shape=local_shape(meta.shape, layout, pricer.mesh.sizes),
            stored_bytes=pricer.local_bytes(meta, layout),
            reason=reason,
            group=star(op.target, graph.blocks),
            trainable=meta.grad,
        )


# --- cost ---------------------------------------------------------------------------------------


def cost(decided: Decided, pricer: Pricer, survey: Survey, scales: Scaling) -> Cost:
    """Predicted time and memory of a decision on one rank."""
    problem = decided.problem
    assert problem is not None
    chosen = zip(problem.nodes, decided.choice, strict=True)
    lowered = [
        record.count * record.time_s
        for _, record in lowered_steps(decided.strategies, decided.choice, pricer)
    ]
    own = [node.count * node.costs_s[s] for node, s in chosen]
    compute = math.fsum([*own, *(-seconds for seconds in lowered)])
    converted = [
        tensor.count * tensor.costs_s[have, want]
        for tensor, have, want in problem.conversions(decided.choice)
    ]
    moved = math.fsum([*converted, *lowered])
    terms = cost_terms(decided, pricer, survey, scales)
    return Cost(compute, moved, memory(decided, survey), terms=terms)


def memory(decided: Decided, survey: Survey) -> Memory:
    """What a decision holds on one rank, and when most."""
    problem = decided.problem
    assert problem is not None
    timeline = problem.timeline(decided.choice)
    total = list(map(sum, zip(*timeline.values(), strict=True)))
    live = max(total)
    moment = total.index(live)
    most = {f"{kind}_bytes": max(line) for kind, line in timeline.items()}
    return Memory(
        **most,
        slack_bytes=problem.with_slack(live) - live,
        at_peak=tuple(timeline[kind][moment] for kind in PARTS),
        peak_at=moment_in_words(survey.folded, survey.lifetimes, moment),
    )


def fallbacks(decided: Decided) -> Iterable[FallbackRecord]:
    """Operators without a rule that a rule could have split: those on the gradient's way."""
    problem, found = decided.problem, dict[str, list]()
    assert problem is not None
    for index, cls in enumerate(decided.folded.classes):
        if cls.op.kind == "call" and decided.strategies.rules[index] is None and cls.op.operands:
            entry = found.setdefault(cls.op.target, [0, 0.0, {}])
            entry[0] += cls.count
            entry[1] += cls.count * problem.nodes[index].costs_s[decided.choice[index]]
            entry[2][cls.module] = None
    for op, (count, cost_s, modules) in sorted(found.items()):
        yield FallbackRecord(op, count, cost_s, tuple(modules))
