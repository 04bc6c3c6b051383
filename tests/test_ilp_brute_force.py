"""The integer program against exhaustive enumeration, on problems and on graphs small enough for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoshard.cost.fusion import traffic
from autoshard.cost.hardware import load_hardware
from autoshard.errors import InfeasibleError, SolverError
from autoshard.graph import Op, OpGraph, Ref, Slot, TensorMeta
from autoshard.ilp.problem import Hold, Node, Problem, Tensor, Use
from autoshard.ilp.solve import TIE, UNIT_S, solve
from autoshard.mesh import Mesh
from autoshard.placement import I, R, convertible
from autoshard.planner import Options, surveyed
from autoshard.planner.lowered import lowered_s
from autoshard.planner.price import price
from autoshard.strategies import Strategies, derive

Choice = tuple[int, ...]

# ---- problems drawn at random ----------------------------------------------------------------

SECONDS = st.integers(0, 40).map(lambda n: n * 1e-6)
BYTES = st.tuples(st.integers(0, 9), st.sampled_from([2**10, 2**20, 2**33]), st.integers(0, 3)).map(
    lambda drawn: drawn[0] * drawn[1] + drawn[2]
)
"""Up to 72 GiB, a few bytes apart."""


@st.composite
def problems(draw) -> Problem:
    """A few nodes, tensors with up to three takers, forbidden conversions, memory that comes and goes."""
    widths = draw(st.lists(st.integers(1, 3), min_size=2, max_size=5))
    nodes = tuple(
        Node(
            f"node {i}",
            draw(st.integers(1, 3)),
            tuple(draw(SECONDS) for _ in range(width)),
            (0.0,) * width,
        )
        for i, width in enumerate(widths)
    )
    tensors = tuple(draw(_tensor(widths, i)) for i in range(len(widths) - 1))
    own = [draw(_own_memory(i, width)) for i, width in enumerate(widths)]
    copies = [draw(_copies(i, tensor)) for i, tensor in enumerate(tensors)]
    slack = draw(st.sampled_from([0.0, 0.05]))
    return Problem(nodes, tensors, None, (*own, *copies), MOMENTS, slack)


MOMENTS = 4


SPANS = st.lists(
    st.tuples(st.integers(0, MOMENTS - 1), st.integers(0, MOMENTS - 1)).map(
        lambda pair: (min(pair), max(pair))
    ),
    min_size=1,
    max_size=3,
)
"""From one moment to another, several times over."""


@st.composite
def _own_memory(draw, node: int, width: int) -> Hold:
    sizes = tuple(draw(BYTES) for _ in range(width))
    return Hold("activations", draw(SPANS), node=node, sizes=sizes)


@st.composite
def _copies(draw, index: int, tensor: Tensor) -> Hold:
    """What conversions make, for some of the takers, or what is taken as it is."""
    uses = tuple(range(len(tensor.uses)))
    kept = draw(st.sets(st.sampled_from(uses), min_size=1)) if uses else set()
    unless = tuple(u for u in uses if u not in kept and draw(st.booleans()))
    copies = tuple((frozenset({pair}), draw(BYTES)) for pair in sorted(tensor.costs_s))
    same = frozenset((state, state) for state in range(3))
    return Hold(
        "transient",
        draw(SPANS),
        tensor=index,
        uses=tuple(sorted(kept)),
        unless=unless,
        copies=((same, draw(BYTES)), *copies),
    )


def held(problem: Problem, choice: Choice, moment: int) -> int:
    """Bytes at a moment, counted one hold after another."""
    found = 0
    for hold in problem.holds:
        times = [first <= moment <= last for first, last in hold.spans].count(True)
        if hold.tensor < 0:
            found += times * hold.sizes[choice[hold.node]]
            continue
        tensor = problem.tensors[hold.tensor]
        have = tensor.haves[choice[tensor.producer]]
        ways = [(have, use.wants[choice[use.node]]) for use in tensor.uses]
        for pairs, size in hold.copies:
            taken = any(ways[u] in pairs for u in hold.uses)
            spared = any(ways[u] in pairs for u in hold.unless)
            found += times * size * (taken and not spared)
    return found


@st.composite
def _tensor(draw, widths: list[int], producer: int) -> Tensor:
    states = st.integers(0, 2)
    takers = draw(
        st.lists(st.integers(producer + 1, len(widths) - 1), min_size=1, max_size=3, unique=True)
    )
    uses = []
    for taker in takers:
        wants = tuple(draw(states) for _ in range(widths[taker]))
        pairs = {(h, w) for h in range(3) for w in range(3) if h == w or draw(st.integers(0, 3))}
        uses.append(Use(taker, wants, frozenset(pairs)))
    pairs = {pair for use in uses for pair in use.pairs if pair[0] != pair[1]}
    costs = {pair: draw(SECONDS) for pair in sorted(pairs)}
    haves = tuple(draw(states) for _ in range(widths[producer]))
    count = draw(st.integers(1, 3))
    return Tensor(producer, count, haves, tuple(uses), costs, dict.fromkeys(costs, 0.0))


def enumerated(problem: Problem) -> Iterator[tuple[Choice, float, int]]:
    """Every choice that is possible, with its seconds and its bytes, counted here anew."""
    for choice in itertools.product(*(range(len(node.costs_s)) for node in problem.nodes)):
        seconds = sum(n.count * n.costs_s[s] for n, s in zip(problem.nodes, choice, strict=True))
        live = max(held(problem, choice, moment) for moment in range(problem.moments))
        size = live + math.ceil(live * problem.slack)
        for tensor in problem.tensors:
            have, paid = tensor.haves[choice[tensor.producer]], set()
            for use in tensor.uses:
                want = use.wants[choice[use.node]]
                if (have, want) not in use.pairs:
                    break
                if want != have:
                    paid.add(want)
            else:
                seconds += tensor.count * sum(tensor.costs_s[have, want] for want in sorted(paid))
                continue
            break
        else:
            yield choice, seconds, size


@settings(max_examples=150, deadline=None)
@given(
    problems(),
    st.integers(-1, 40),
    st.integers(-1, 1),
    st.sampled_from(["HiGHS", "HiGHS", "HiGHS", "CBC"]),
)
def test_the_optimum_is_that_of_exhaustive_enumeration(problem, which, off, solver) -> None:
    """The budget is what one of the choices takes, or a byte more or less; or there is none."""
    known = list(enumerated(problem))
    sizes = sorted({size for _, _, size in known}) or [2**20]
    budget = max(0, sizes[which % len(sizes)] + off) if which >= 0 else None
    stated = replace(problem, budget_bytes=budget)
    fit = [seconds for _, seconds, size in known if budget is None or size <= budget]
    if not known:
        with pytest.raises(SolverError, match="satisfies the constraints"):
            solve(stated, solver=solver)
        return
    if not fit:
        with pytest.raises(InfeasibleError) as caught:
            solve(stated, solver=solver)
        named = caught.value.least_budget_bytes
        assert named in sizes
        assert named <= min(sizes) * (1 + 1e-5)  # solvers round to a millionth
        least = solve(replace(problem, budget_bytes=named), solver=solver)
        assert stated.bytes(least.choice) <= named
        return
    found = solve(stated, solver=solver)
    by_choice = {choice: (seconds, size) for choice, seconds, size in known}
    seconds, size = by_choice[found.choice]  # a KeyError is a choice that cannot be
    assert seconds == pytest.approx(min(fit), abs=1e-12)
    assert found.objective_s == pytest.approx(seconds, abs=1e-12)
    if found.binaries:
        assert found.bound_s == pytest.approx(seconds, abs=1e-10)
    assert budget is None or size <= budget
    assert size == stated.bytes(found.choice)


def test_among_equals_the_tie_break_decides_and_never_beats_a_real_cost() -> None:
    def node(costs: tuple[float, ...], ties: tuple[float, ...]) -> Problem:
        return Problem((Node("n", 1, costs, ties),), ())

    assert solve(node((1e-6, 1e-6), (1.0, 0.0))).choice == (1,)
    nearly = 1e-6 + 2 * TIE * UNIT_S  # further apart than ties are
    assert solve(node((1e-6, nearly), (1.0, 0.0))).choice == (0,)


# ---- graphs drawn at random ------------------------------------------------------------------

SIZE = 8
FLOAT = TensorMeta((SIZE, SIZE), "float32", True)


class Builder:
    """A graph of square matrices, written an operator at a time."""

    def __init__(self) -> None:
        self.ops: list[Op] = [Op("x", "input", "x", results=(TensorMeta((SIZE, SIZE), "float32"),))]

    def weight(self, fqn: str, shape: tuple[int, ...] = (SIZE, SIZE)) -> str:
        name = fqn.replace(".", "_")
        meta = TensorMeta(shape, "float32", True)
        self.ops.append(Op(name, "parameter", fqn, results=(meta,), fqns=(fqn,)))
        return name

    def call(self, target: str, operands: list[str], module: str, *rest: object) -> str:
        name = f"op{len(self.ops)}"
        args = (*(Slot(i) for i in range(len(operands))), *rest)
        refs = tuple(Ref(operand) for operand in operands)
        self.ops.append(
            Op(name, "call", target, args, operands=refs, results=(FLOAT,), module=module)
        )
        return name

    def graph(self, results: list[str]) -> OpGraph:
        args = tuple(Slot(i) for i in range(len(results)))
        refs = tuple(Ref(name) for name in results)
        out = Op("output", "output", "output", (args,), operands=refs)
        graph = OpGraph((*self.ops, out), "Drawn", frozenset({"layers.0", "layers.1"}))
        graph.verify()
        return graph


BODIES = ("linear", "relu", "add", "mul", "residual", "tied")


@st.composite
def graphs(draw, layers: int) -> OpGraph:
    """Layers alike: products, elementwise operators, residuals, and a weight that is used twice."""
    body = draw(st.lists(st.sampled_from(BODIES), min_size=1, max_size=3))
    assume("linear" in body or "tied" in body)
    made = Builder()
    current, last = "x", "x"
    for layer in range(layers):
        entered, module = current, f"layers.{layer}"
        tied = made.weight(f"{module}.tied.weight") if "tied" in body else ""
        for number, kind in enumerate(body):
            where, before = f"{module}.{kind}{number}", current
            if kind == "linear":
                weight = made.weight(f"{where}.weight")
                current = made.call("aten.linear.default", [current, weight], where)
            elif kind == "tied":
                current = made.call("aten.linear.default", [current, tied], where)
            elif kind == "relu":
                current = made.call("aten.relu.default", [current], where)
            else:
                other = entered if kind == "residual" else last
                target = "aten.mul.Tensor" if kind == "mul" else "aten.add.Tensor"
                current = made.call(target, [current, other], where)
            last = before
    return made.graph([current])


class Exhausted:
    """All that can be chosen for a graph, priced operator by operator on the graph itself, unfolded."""

    def __init__(self, graph: OpGraph, options: Options) -> None:
        self.graph, self.pricer = graph, options.pricer
        self.survey = surveyed(graph, options)
        self.strategies: Strategies = derive(
            self.survey.folded, options.mesh, search=options.search, rules=self.survey.rules
        )
        self.problem = price(self.strategies, self.pricer, self.survey, None)
        of_op = {name: self.survey.rules[i] for name, i in self.survey.folded.class_of.items()}
        self.moves = traffic(graph, of_op, fused=options.hardware.fused_pointwise)
        self.own: dict[tuple[str, int], float] = {}
        self.converted: dict = {}

    def choices(self) -> Iterator[Choice]:
        return itertools.product(*(range(len(found)) for found in self.strategies.choices))

    @property
    def size(self) -> int:
        return math.prod(len(found) for found in self.strategies.choices)

    def seconds(self, choice: Choice) -> float | None:
        """A step's time; None where some tensor cannot be had as it is wanted."""
        class_of, choices = self.survey.folded.class_of, self.strategies.choices
        picked = {
            op.name: choices[class_of[op.name]][choice[class_of[op.name]]] for op in self.graph.ops
        }
        total = 0.0
        for ref, consumers in self.graph.consumers.items():
            have = picked[ref.op].results[ref.index]
            wants = []
            for op, position in consumers:
                want = picked[op.name].operands[position]
                if not self._allowed(ref, op, position, have, want):
                    return None
                wants.append(want)
            for want in sorted(set(wants) - {have}, key=str):
                total += self._conversion(ref, have, want)
        return total + sum(self._own(op, choice[class_of[op.name]]) for op in self.graph.ops)

    def _allowed(self, ref: Ref, op: Op, position: int, have, want) -> bool:
        class_of = self.survey.folded.class_of
        if have == want:
            return True
        if (class_of[op.name], position) in self.strategies.locked:
            return False
        if (class_of[ref.op], ref.index) in self.strategies.fixed:
            return (have, want) == ((I,), (R,))
        return convertible(have, want)

    def _conversion(self, ref: Ref, have, want) -> float:
        key = (self.graph.meta(ref), have, want)
        if key not in self.converted:
            steps = self.pricer.conversion(*key)
            phases = {"forward": 0.0, "backward": 0.0}
            for step in steps:
                phases[step.phase] += step.time_s
            self.converted[key] = phases["forward"] + phases["backward"]
        return self.converted[key]

    def _own(self, op: Op, picked: int) -> float:
        if (op.name, picked) not in self.own:
            index = self.survey.folded.class_of[op.name]
            strategy = self.strategies.choices[index][picked]
            metas = self.graph.operand_metas(op)
            if op.kind == "parameter":
                found = self.pricer.optimizer_s(self.graph.meta(Ref(op.name)), strategy.results[0])
            else:
                rule = self.survey.rules[index]
                found = self.pricer.op_s(op, rule, strategy, metas, self.moves[op.name])
                found += lowered_s(strategy, self.pricer) if op.kind == "call" else 0.0
            self.own[op.name, picked] = found
        return self.own[op.name, picked]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 2).flatmap(graphs),
    st.sampled_from(["ideal", "l40s-pcie", "cpu-gloo"]),
    st.sampled_from(["tensor", "all"]),
    st.booleans(),
    st.floats(0.0, 1.0),
)
def test_plans_of_graphs_are_the_best_of_all(graph, hardware, search, uniform, share) -> None:
    """Folded or not, every operator of the whole graph is priced by itself, and every choice tried."""
    options = Options(Mesh.of({"tp": 2}), load_hardware(hardware), search=search, uniform=uniform)
    all_of_it = Exhausted(graph, options)
    assume(all_of_it.size <= 40_000)
    known = [(c, s) for c in all_of_it.choices() if (s := all_of_it.seconds(c)) is not None]
    assert known  # the replicated program always is
    sizes = {choice: all_of_it.problem.bytes(choice) for choice, _ in known}
    problem, least = all_of_it.problem, min(sizes.values())

    free = solve(problem)
    best = min(seconds for _, seconds in known)
    assert free.objective_s == pytest.approx(best, rel=1e-6, abs=1e-10)
    assert all_of_it.seconds(free.choice) == pytest.approx(free.objective_s, rel=1e-9, abs=1e-13)

    budget = int(least + share * (max(sizes.values()) - least))
    bound = solve(replace(problem, budget_bytes=budget))
    assert sizes[bound.choice] <= budget
    fitting = min(seconds for choice, seconds in known if sizes[choice] <= budget)
    assert bound.objective_s == pytest.approx(fitting, rel=1e-6, abs=1e-10)

    with pytest.raises(InfeasibleError) as caught:
        solve(replace(problem, budget_bytes=least - 1))
    assert caught.value.least_budget_bytes == least
