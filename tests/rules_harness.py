"""Execute one strategy of one operator on every rank, and hold it to what its placements promise.

No conversion runs: each operand is given to the ranks as the strategy wants it, made by hand from the
whole tensor (slices, copies, or random shares that sum to it), and each result and each gradient is read
back in the same way. So a strategy is tested against the algebra's own contract, `autoshard.placement`:

    state        value                          gradient
    I            the same on every rank         the same on every rank
    R            the same on every rank         shares that sum to it
    P            shares that sum to it          the same on every rank
    S            slices                         slices
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autoshard import cuts as module_of_cuts
from autoshard import strategies as module_of_strategies
from autoshard.capture import Captured
from autoshard.capture.convert import _Reader
from autoshard.capture.gradients import carrying
from autoshard.capture.memory import pinned
from autoshard.compat import tree_flatten
from autoshard.cuts import reaches
from autoshard.cuts import splits as may_split
from autoshard.fold import Folded, fold
from autoshard.graph import Op, OpGraph, TensorMeta
from autoshard.mesh import Mesh
from autoshard.placement import Partial, Placement, Replicate, Shard
from autoshard.planner import Decided
from autoshard.rewrite import rewrite
from autoshard.runtime import simulator
from autoshard.runtime.slicing import join, take
from autoshard.strategies import Strategies, Strategy, derive

MAX_BLOCKS = 3
BOUND = 1e-9


@dataclass(frozen=True)
class Spec:
    """A tensor still to be drawn."""

    draw: Callable[[torch.Generator], Tensor]
    grad: bool = False


def normal(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Spec:
    """A float tensor of normal numbers, none of them near zero or near another's multiple."""
    return Spec(lambda g: torch.randn(shape, generator=g, dtype=dtype), grad)


def uniform(*shape: int, low: float = 0.1, high: float = 0.9, grad: bool = True) -> Spec:
    """A float64 tensor of numbers between `low` and `high`."""
    return Spec(
        lambda g: torch.rand(shape, generator=g, dtype=torch.float64) * (high - low) + low, grad
    )


def ints(high: int, *shape: int, low: int = 0) -> Spec:
    """An int64 tensor of numbers from `low` up to but not `high`."""
    return Spec(lambda g: torch.randint(low, high, shape, generator=g))


def bools(*shape: int) -> Spec:
    """A bool tensor."""
    return Spec(lambda g: torch.rand(shape, generator=g) > 0.4)


def exactly(values: Any, dtype: torch.dtype | None = None, *, grad: bool = False) -> Spec:
    """A tensor of these values."""
    return Spec(lambda _: torch.tensor(values, dtype=dtype), grad)


def complexes(*shape: int) -> Spec:
    """A complex128 tensor."""
    return Spec(lambda g: torch.randn(shape, generator=g, dtype=torch.complex128), grad=True)


@dataclass(frozen=True)
class Case:
    """One call of an operator: arguments as export leaves them, with a `Spec` for each tensor.

    Attributes:
        target: the operator's name, "aten.linear.default".
        args, kwargs: what it is called with.
        splits: whether some strategy must split something on two ranks.
        values: False for an operator whose values mean nothing (`empty_like`).
        bound: relative error allowed.
    """

    target: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    splits: bool = True
    values: bool = True
    bound: float = BOUND

    @property
    def name(self) -> str:
        return self.target.removeprefix("aten.").removesuffix(".default")


def case(
    target: str,
    *args: Any,
    splits: bool = True,
    values: bool = True,
    bound: float = BOUND,
    **kwargs: Any,
) -> Case:
    """A case of `aten.<target>`; `.default` and `aten.` may be left out."""
    if not target.startswith(("aten.", "transformers.", "rules_tests.")):
        target = f"aten.{target}"
    if target.count(".") < 2:
        target += ".default"
    return Case(target, args, kwargs, splits, values, bound)


def overload(target: str) -> Any:
    """The torch operator of a name."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value`, a nest of tuples and lists, with `function` applied to what is in it."""
    if isinstance(value, (list, tuple)):
        return type(value)([_map(item, function) for item in value])
    return function(value)


@dataclass(frozen=True)
class Single:
    """A graph of one call, with the tensors it is called on.

    Attributes:
        captured: the graph as capture leaves it.
        folded: its classes, one an operator.
        tensors: the operands, whole, in order.
        args, kwargs: of the call, with tensors in place.
    """

    case: Case
    captured: Captured
    folded: Folded
    tensors: tuple[Tensor, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def target(self) -> Any:
        return overload(self.case.target)

    @property
    def call(self) -> int:
        """The class of the call."""
        return next(i for i, cls in enumerate(self.folded.classes) if cls.op.kind == "call")


def build(found: Case) -> Single:
    """Draw a case's tensors and make a graph of its one call."""
    generator = torch.Generator().manual_seed(sum(map(ord, found.target)))
    graph, tensors, leaves = Graph(), [], {}
    nodes: list[Node] = []

    def draw(item: Any) -> Any:
        if not isinstance(item, Spec):
            return item
        x = item.draw(generator)
        x = x.clone(memory_format=torch.contiguous_format).requires_grad_(item.grad)
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = x
        meta = TensorMeta(tuple(x.shape), str(x.dtype)[6:], item.grad)
        leaves[node.name] = Op(node.name, "input", node.name, results=(meta,))
        tensors.append(x)
        nodes.append(node)
        return x

    args = _map(found.args, draw)
    kwargs = {key: _map(value, draw) for key, value in found.kwargs.items()}
    by_id = {id(x): node for x, node in zip(tensors, nodes, strict=True)}

    def place(item: Any) -> Any:
        return by_id[id(item)] if isinstance(item, Tensor) else item

    target = overload(found.target)
    node = graph.call_function(
        target, _map(args, place), {k: _map(v, place) for k, v in kwargs.items()}
    )
    torch.manual_seed(0)
    with torch.no_grad():
        copies = _map(args, lambda v: v.detach().clone() if isinstance(v, Tensor) else v)
        node.meta["val"] = target(
            *copies,
            **{
                k: _map(v, lambda x: x.detach().clone() if isinstance(x, Tensor) else x)
                for k, v in kwargs.items()
            },
        )
    outputs = [node]
    if isinstance(node.meta["val"], (list, tuple)):
        node.meta["val"] = tuple(node.meta["val"])
        outputs = [
            graph.call_function(operator.getitem, (node, i))
            for i, value in enumerate(node.meta["val"])
            if isinstance(value, Tensor)
        ]
    graph.output(tuple(outputs))
    trained = {n.name for n, x in zip(nodes, tensors, strict=True) if x.requires_grad}
    reader = _Reader(leaves, pinned(graph), carrying(graph, trained))  # type: ignore[arg-type]
    for item in graph.nodes:
        reader.read(item)
    refs = tuple(reader.value(item) for item in outputs)
    spec = tree_flatten(())[1]
    captured = Captured(OpGraph(tuple(reader.ops)), graph, {}, (), spec, spec, refs, True)
    return Single(
        found, captured, fold(captured.graph, uniform=False), tuple(tensors), args, kwargs
    )


@contextmanager
def every_strategy() -> Iterator[None]:
    """Let `derive` list what no single-operator graph asks for: blocks, and operands that are shares."""

    def cuts(folded: Any, rules: Any, n: int) -> Any:
        return {
            (i, factor): frozenset(
                k for k in range(1, MAX_BLOCKS + 1) if may_split(rule, factor, k, n)
            )
            for i, rule in enumerate(rules)
            if rule
            for factor, _ in rule.sizes
            if may_split(rule, factor, 1, n)
        }

    def partial(folded: Any, rules: Any, n: int) -> Any:
        ops = [cls.op for cls in folded.classes]
        return frozenset((i, r) for i, op in enumerate(ops) for r in range(len(op.results)))

    with (
        mock.patch.object(module_of_strategies, "possible_cuts", cuts),
        mock.patch.object(module_of_cuts, "reaches", lambda size, n: size > 1),
        mock.patch.object(module_of_strategies, "_may_be_partial", partial),
    ):
        yield


def strategies_of(single: Single, ranks: int) -> Strategies:
    """All strategies of a case's call."""
    with every_strategy():
        return derive(single.folded, Mesh.of({"tp": ranks}), search="all")


def splits(strategy: Strategy) -> bool:
    """Whether a strategy splits something."""
    return any(isinstance(layout[0], Shard) for layout in (*strategy.operands, *strategy.results))


# --- one tensor on all ranks --------------------------------------------------------------------


def give(x: Tensor, state: Placement, n: int, seed: int) -> list[Tensor]:
    """The ranks' tensors of a whole one."""
    x = x.detach()
    if isinstance(state, Shard):
        return [take(x, state.dim, state.blocks, r, n).clone() for r in range(n)]
    if isinstance(state, Partial):
        return _shares(x, n, seed)
    return [x.clone() for _ in range(n)]


def _shares(x: Tensor, n: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if x.is_floating_point() or x.is_complex():
        parts = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(n - 1)]
    else:
        parts = [
            torch.randint(-5, 5, x.shape, generator=generator).to(x.dtype) for _ in range(n - 1)
        ]
    return [*parts, x - sum(parts)] if parts else [x.clone()]


def gradient_of(state: Placement) -> Placement:
    """The state of a tensor's gradient."""
    swapped: dict[type, Placement] = {Replicate: Partial(), Partial: Replicate()}
    return swapped.get(type(state), state)


def read(xs: Sequence[Tensor], state: Placement, what: str) -> Tensor:
    """The whole tensor of which the ranks hold parts."""
    if isinstance(state, Shard):
        return join(list(xs), state.dim, state.blocks)
    if isinstance(state, Partial):
        return torch.stack(list(xs)).sum(0).to(xs[0].dtype)
    for rank, x in enumerate(xs):
        assert_close(x, xs[0], BOUND, f"{what} on rank {rank} against rank 0")
    return xs[0]


def assert_close(found: Tensor, wanted: Tensor, bound: float, what: str) -> None:
    assert found.shape == wanted.shape, (
        f"{what}: shape {list(found.shape)}, wanted {list(wanted.shape)}"
    )
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype}, wanted {wanted.dtype}"
    a, b = (
        torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()
        for t in (found, wanted)
    )
    if torch.equal(a, b):
        return
    a, b = a.double(), b.double()
    same = torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)
    scale = max(float(b.abs().nan_to_num(0, 0, 0).max()), 1e-6)
    error = float((a - b).abs().masked_fill(same, 0.0).nan_to_num(float("inf")).max()) / scale
    assert error <= bound, f"{what}: off by {error:.2e}"


# --- run ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """What the whole operator computes.

    Attributes:
        results: of the operator; None for one that is no tensor.
        cotangents: for each result that has a gradient, the gradient it is given.
        gradients: of the operands; None for one that needs none.
        operands: the operands afterwards (an operator may write to them).
    """

    results: tuple[Tensor | None, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    operands: tuple[Tensor, ...]


def reference(single: Single) -> Reference:
    """Run the operator on the whole tensors, forward and backward."""
    own = {id(x): x.detach().clone().requires_grad_(x.requires_grad) for x in single.tensors}
    args = _map(single.args, lambda v: own[id(v)] if isinstance(v, Tensor) else v)
    kwargs = {
        k: _map(v, lambda x: own[id(x)] if isinstance(x, Tensor) else x)
        for k, v in single.kwargs.items()
    }
    torch.manual_seed(0)
    made = single.target(*args, **kwargs)
    results = tuple(made) if isinstance(made, (list, tuple)) else (made,)
    leaves = [own[id(x)] for x in single.tensors]
    cotangents = tuple(_cotangent(r, i) for i, r in enumerate(results))
    gradients = backward(results, cotangents, leaves)
    return Reference(results, cotangents, gradients, tuple(x.detach() for x in leaves))


def _cotangent(result: Tensor | None, index: int) -> Tensor | None:
    if result is None or not result.requires_grad:
        return None
    return torch.randn(
        result.shape, generator=torch.Generator().manual_seed(100 + index), dtype=result.dtype
    )


def backward(
    results: Sequence[Tensor | None], cotangents: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of the leaves; None for one that needs none, zeros for one that has none."""
    pairs = [
        (r, c)
        for r, c in zip(results, cotangents, strict=True)
        if c is not None and r.requires_grad
    ]  # type: ignore[union-attr]
    wanted = [x for x in leaves if x.requires_grad]
    if not pairs or not wanted:
        return tuple(torch.zeros_like(x) if x.requires_grad else None for x in leaves)
    found = iter(
        torch.autograd.grad([r for r, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True)  # type: ignore[arg-type]
    )
    made = [next(found) if x.requires_grad else None for x in leaves]
    return tuple(
        torch.zeros_like(x) if x.requires_grad and g is None else g
        for x, g in zip(leaves, made, strict=True)
    )


def execute(single: Single, found: Strategies, index: int, wanted: Reference) -> None:
    """Run strategy `index` of the call on every rank, and compare with the whole operator."""
    strategy, n = found.choices[single.call][index], found.mesh.size
    program = rewrite(single.captured, _decided(single, found, index))
    states = [layout[0] for layout in strategy.operands]
    given = {
        f"x{i}": [part.requires_grad_(x.requires_grad) for part in give(x, state, n, 7 + i)]
        for i, (x, state) in enumerate(zip(single.tensors, states, strict=True))
    }
    leaves = [given[leaf.op.name] for leaf in program.leaves]
    aliases = [[x.view_as(x) for x in parts] for parts in leaves]
    torch.manual_seed(0)
    made = simulator.run(program.graph, aliases, found.mesh)
    results = iter(made)
    of_result = [next(results) if r is not None else None for r in wanted.results]
    for i, (xs, whole) in enumerate(zip(of_result, wanted.results, strict=True)):
        if xs is not None and whole is not None:
            _check_result(single, xs, whole, strategy.results[i][0], n, f"result {i}")
    _check_gradients(single, strategy, given, of_result, wanted, n)
    for i, (x, state) in enumerate(zip(wanted.operands, states, strict=True)):
        if i in _written(found, single):
            assert_close(
                read([y.detach() for y in given[f"x{i}"]], state, f"operand {i}"),
                x,
                single.case.bound,
                f"operand {i} afterwards",
            )


def _written(found: Strategies, single: Single) -> set[int]:
    return {position for index, position in found.locked if index == single.call}


def _decided(single: Single, found: Strategies, index: int) -> Decided:
    """The decision that gives the call its operands, and takes its results, as they are."""
    strategy = found.choices[single.call][index]
    op = single.folded.classes[single.call].op
    operands = {ref.op: layout for ref, layout in zip(op.operands, strategy.operands, strict=True)}
    choices, choice = [], []
    for cls in single.folded.classes:
        if cls.op.kind == "input":
            choices.append((Strategy((), (operands[cls.op.name],)),))
            choice.append(0)
        elif cls.op.kind == "output":
            choices.append(
                (Strategy(tuple(strategy.results[ref.index] for ref in cls.op.operands), ()),)
            )
            choice.append(0)
        else:
            choices.append(found.choices[single.call])
            choice.append(index)
    return Decided(replace(found, choices=tuple(choices)), tuple(choice))


def _check_result(
    single: Single, xs: list[Tensor], whole: Tensor, state: Placement, n: int, what: str
) -> None:
    for x, part in zip(xs, give(whole, state, n, 0), strict=True):
        assert x.shape == part.shape, f"{what}: {list(x.shape)}, wanted {list(part.shape)}"
    if single.case.values:
        assert_close(read(xs, state, what), whole, single.case.bound, what)


def _check_gradients(
    single: Single,
    strategy: Strategy,
    given: dict[str, list[Tensor]],
    results: list[list[Tensor] | None],
    wanted: Reference,
    n: int,
) -> None:
    outputs, cotangents = [], []
    for i, (xs, whole) in enumerate(zip(results, wanted.cotangents, strict=True)):
        if xs is None or whole is None:
            continue
        state = gradient_of(strategy.results[i][0])
        for x, c in zip(xs, give(whole, state, n, 50 + i), strict=True):
            assert x.requires_grad, f"result {i} has no gradient"
            outputs.append(x)
            cotangents.append(c)
    leaves = [x for i in range(len(single.tensors)) for x in given[f"x{i}"]]
    found = backward(outputs, cotangents, leaves)
    for i, whole in enumerate(wanted.gradients):
        parts = found[i * n : (i + 1) * n]
        if whole is None:
            continue
        state = strategy.operands[i][0]
        assert all(p is not None for p in parts)
        what = f"gradient of operand {i}"
        assert_close(read(parts, gradient_of(state), what), whole, single.case.bound, what)  # type: ignore[arg-type]


CRASH = ("aten._weight_norm.default",)
"""Operators of torch that divide by the size of what they are given, and end the process where it is 0."""


def _has_empty(single: Single, strategy: Strategy, wanted: Reference, n: int) -> bool:
    """Whether some rank has nothing of a tensor that is cut."""
    tensors = [*single.tensors, *(r for r in wanted.results if r is not None)]
    layouts = [*strategy.operands, *strategy.results]
    return any(
        isinstance(state, Shard) and not reaches(x.shape[state.dim], n)
        for x, (state,) in zip(tensors, layouts, strict=True)
    )


def check(found: Case, ranks: Sequence[int] = (2, 3, 4, 5)) -> int:
    """Execute every strategy of a case on each number of ranks; how many were executed.

    On 3 and 5 ranks slices have different sizes. Some are empty, as no plan has them: strategies are left
    out where the operator refuses that, as a convolution does by a result of the wrong shape.
    """
    single = build(found)
    wanted = reference(single)
    executed = 0
    for n in ranks:
        listed = strategies_of(single, n)
        rule = listed.rules[single.call]
        assert rule is not None, f"{found.target} has no rule for this call"
        choices = listed.choices[single.call]
        if n == 2:
            assert any(map(splits, choices)) == found.splits, (
                f"{rule}: {'; '.join(map(str, choices))}"
            )
        for index, strategy in enumerate(choices):
            if found.target in CRASH and _has_empty(single, strategy, wanted, n):
                continue
            try:
                execute(single, listed, index, wanted)
            except Exception as error:
                odd = "conv" in found.target or "pixel_unshuffle" in found.target
                refused = not isinstance(error, AssertionError) or odd
                if refused and _has_empty(single, strategy, wanted, n):
                    continue
                error.add_note(f"{found.target} on {n} ranks, rule {rule}, strategy {strategy}")
                raise
            executed += 1
    return executed
