"""Tell of a decision: the records that make up a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoshard.cost.model import Pricer, Step
from autoshard.fold import star
from autoshard.graph import OpGraph
from autoshard.ilp.problem import Problem, Tensor
from autoshard.placement import I, Layout, Shard, conversion, local_shape
from autoshard.plan_types import (
    Choice,
    CollectiveRecord,
    Cost,
    FallbackRecord,
    Memory,
    Plan,
    SolverRecord,
    WeightRecord,
)
from autoshard.planner.decide import Decided, Options
from autoshard.planner.lowered import lowered_steps
from autoshard.planner.roles import role


def record(graph: OpGraph, decided: Decided, options: Options, others: dict[str, Decided]) -> Plan:
    """The plan of a decision.

    Args:
        graph: the whole graph.
        decided: a strategy for each of its classes, with the problem and its solution.
        options: what it was made for.
        others: decisions to show beside it, by name; "replicated" is added.
    """
    problem, solution = decided.problem, decided.solution
    assert problem is not None and solution is not None
    pricer = options.pricer
    whole = Decided(decided.strategies, (0,) * len(decided.choice), problem)
    baselines = {name: cost(other, pricer) for name, other in {"replicated": whole, **others}.items() if other.problem and other.problem.possible(other.choice)}
    found = cost(decided, pricer)
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        mesh=options.mesh,
        hardware=options.hardware.name,
        mode=options.mode,
        search=options.search,
        memory_budget_bytes=options.memory_budget_bytes,
        weights=tuple(_weights(graph, decided, pricer)),
        collectives=tuple(_collectives(decided, pricer)),
        fallbacks=tuple(_fallbacks(decided, problem)),
        cost=Cost(found.compute_s, found.comm_s, found.memory, baselines),
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
        inputs=tuple(_inputs(graph)),
        uniform=options.uniform,
        constraints=options.constraints,
    )


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


def _weights(graph: OpGraph, decided: Decided, pricer: Pricer) -> Iterable[WeightRecord]:
    for op in graph.weights:
        index = decided.folded.class_of[op.name]
        layout, meta = decided.strategy(op.name).results[0], op.results[0]
        assert meta is not None
        split = role(decided.strategies, index, layout[0])
        yield WeightRecord(
            fqns=op.fqns,
            shape=meta.shape,
            dtype=meta.dtype,
            split=split,
            placements=layout,
            local_shape=local_shape(meta.shape, layout, pricer.mesh.sizes),
            stored_bytes=pricer.local_bytes(meta, layout),
            reason=_why(decided, index, layout, split),
            group=star(op.target, graph.blocks),
            trainable=meta.grad,
        )


_SPLIT_REASONS = {
    "column": "its output features are split; each rank makes its own part of the result",
    "row": "its input features are split; the ranks' results are shares, summed once",
    "vocab": "its rows are split; each rank looks up its own ids, and the shares are summed",
    "shard": "stored split, and gathered where it is used",
}


def _why(decided: Decided, index: int, layout: Layout, split: str) -> str:
    """One sentence on why a weight is stored as it is."""
    state = layout[0]
    if isinstance(state, Shard):
        text = _SPLIT_REASONS.get(split, _SPLIT_REASONS["shard"])
        return text + (f", in {state.blocks} blocks laid end to end" if state.blocks > 1 else "")
    choices = decided.strategies.choices[index]
    if decided.strategies.mesh.size == 1:
        return "there is one rank"
    if len(choices) > 1:
        return "splitting it would not have paid"
    return _cannot(decided, index)


def _cannot(decided: Decided, index: int) -> str:
    folded, n = decided.folded, decided.strategies.mesh.size
    uses = [use for g in folded.groups if g.producer == index for use in g.uses]
    lacking = {folded.classes[node].op.target for node, _ in uses if decided.strategies.rules[node] is None}
    if lacking:
        return f"{', '.join(sorted(lacking))} has no rule that splits it"
    meta = folded.classes[index].op.results[0]
    assert meta is not None
    if all(size % n for size in meta.shape):
        return f"no dimension of {list(meta.shape)} divides by {n}"
    return "the operators that take it need it whole"


# --- collectives --------------------------------------------------------------------------------


def _collectives(decided: Decided, pricer: Pricer) -> Iterable[CollectiveRecord]:
    problem = decided.problem
    assert problem is not None
    found: dict[tuple, CollectiveRecord] = {}
    for tensor, states, step in _steps(decided, problem, pricer):
        made = _one(decided, tensor, states, step)
        key = (made.kind, made.axis, made.phase, made.tensor_shape, made.module, made.op, made.reason)
        if key in found:
            made = _more(found[key], made.count)
        found[key] = made
    for made in lowered_steps(decided.strategies, decided.choice, pricer):
        found[made.kind, made.axis, made.phase, made.tensor_shape, made.module, made.op, made.reason] = made
    return found.values()


def _more(known: CollectiveRecord, count: int) -> CollectiveRecord:
    return CollectiveRecord(**{**known.__dict__, "count": known.count + count})


def _steps(decided: Decided, problem: Problem, pricer: Pricer) -> Iterable[tuple[Tensor, tuple[Layout, Layout], Step]]:
    choices = decided.strategies.choices
    for group, tensor in zip(decided.folded.groups, problem.tensors, strict=True):
        meta = decided.folded.graph.meta(group.example) if decided.folded.graph.by_name[group.example.op].results else None
        have = choices[group.producer][decided.choice[group.producer]].results[group.result] if meta else ()
        wants = [choices[node][decided.choice[node]].operands[position] for node, position in group.uses]
        for want in dict.fromkeys(wants):
            if meta and want != have:
                for step in pricer.conversion(meta, have, want):
                    yield tensor, (have, want), step


def _one(decided: Decided, tensor: Tensor, states: tuple[Layout, Layout], step: Step) -> CollectiveRecord:
    cls = decided.folded.classes[tensor.producer]
    meta = cls.op.results[0]
    users = [
        decided.folded.classes[use.node]
        for use in tensor.uses
        if decided.strategies.choices[use.node][decided.choice[use.node]].operands
    ]
    taker = users[0] if users else cls
    made = cls.op.target if cls.op.kind == "call" else cls.op.kind
    have, want = states
    reason = f"{cls.module or 'the model'} leaves {_state(have)}, {taker.module or 'the model'} takes {_state(want)}"
    assert meta is not None
    return CollectiveRecord(
        kind=step.kind,
        axis=step.axis,
        phase=step.phase,
        tensor_shape=meta.shape,
        bytes=step.bytes,
        count=tensor.count,
        time_s=step.time_s,
        module=cls.module,
        op=made,
        reason=reason,
    )


def _state(layout: Layout) -> str:
    return " × ".join(
        {"I": "it whole", "R": "copies", "P": "shares"}.get(str(p), f"slices {p}") for p in layout
    )


# --- cost ---------------------------------------------------------------------------------------


def cost(decided: Decided, pricer: Pricer) -> Cost:
    """Predicted time and memory of a decision on one rank."""
    problem = decided.problem
    assert problem is not None
    compute = math.fsum(n.count * n.costs_s[s] for n, s in zip(problem.nodes, decided.choice, strict=True))
    moved = math.fsum(t.count * t.costs_s[pair] for t, *pair_ in problem.conversions(decided.choice) for pair in [tuple(pair_)])
    return Cost(compute, moved, _memory(decided, problem, pricer))


def _memory(decided: Decided, problem: Problem, pricer: Pricer) -> Memory:
    totals, activations, largest = [0, 0, 0], 0, 0
    for index, cls in enumerate(decided.folded.classes):
        strategy = decided.strategies.choices[index][decided.choice[index]]
        meta = cls.op.results[0] if cls.op.results else None
        if cls.op.stored and meta is not None:
            parts = pricer.weight_bytes(meta, strategy.results[0])
            totals = [t + cls.count * p for t, p in zip(totals, parts, strict=True)]
        elif cls.op.kind == "call":
            activations += cls.count * problem.nodes[index].bytes[decided.choice[index]]
            sizes = [pricer.local_bytes(m, lay) for m, lay in zip(cls.op.results, strategy.results, strict=True) if m]
            largest = max(largest, sum(sizes))
    return Memory(*totals, activations_bytes=activations, transient_bytes=largest)


def _fallbacks(decided: Decided, problem: Problem) -> Iterable[FallbackRecord]:
    """Operators without a rule that a rule could have split: those on the gradient's way."""
    found: dict[str, list] = {}
    for index, cls in enumerate(decided.folded.classes):
        if cls.op.kind == "call" and decided.strategies.rules[index] is None and cls.op.operands:
            entry = found.setdefault(cls.op.target, [0, 0.0, {}])
            entry[0] += cls.count
            entry[1] += cls.count * problem.nodes[index].costs_s[decided.choice[index]]
            entry[2][cls.module] = None
    for op, (count, cost_s, modules) in sorted(found.items()):
        yield FallbackRecord(op, count, cost_s, tuple(modules))


__all__ = ["I", "conversion", "cost", "record"]
