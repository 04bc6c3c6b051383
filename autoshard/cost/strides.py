"""Which operators copy: those that want a tensor laid out in order where it is not.

Eager execution gives permuted tensors as views, and copies them where a later operator cannot view
them. What order a tensor's dimensions have in memory is followed through the graph; it is a price, not
a promise, and an operator that is not known here is taken to give its result in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.graph import Op, OpGraph, Ref, TensorMeta
from autoshard.rules.rule import Call


@dataclass(frozen=True, slots=True)
class Order:
    """How a tensor lies in memory.

    Attributes:
        dims: its dimensions, outermost first.
        gaps: whether it is a slice of something larger, or stretched.
    """

    dims: tuple[int, ...]
    gaps: bool = False

    @property
    def plain(self) -> bool:
        """Whether it is contiguous."""
        return not self.gaps and self.dims == tuple(range(len(self.dims)))


_PERMUTES = ("permute", "transpose", "t", "mT", "movedim")
_CUTS = ("slice", "narrow", "select", "split", "split_with_sizes", "chunk", "unbind", "expand")
_ORDERS = ("contiguous", "clone")
_SAME_SHAPE = ("pointwise", "reduction")


def copying(graph: OpGraph, family: dict[str, str]) -> frozenset[str]:
    """The names of the view operators that copy.

    Args:
        graph: the whole graph.
        family: of each call's rule, by the op's name; "" where it has none.
    """
    orders: dict[Ref, Order] = {}
    found = set()
    for op in graph.ops:
        metas = graph.operand_metas(op)
        given = [orders[ref] for ref in op.operands]
        copies, made = _through(op, metas, given, graph, family.get(op.name, ""))
        if copies:
            found.add(op.name)
        orders |= {Ref(op.name, i): order for i, order in enumerate(made)}
    return frozenset(found)


def _through(
    op: Op, metas: tuple[TensorMeta, ...], given: list[Order], graph: OpGraph, family: str
) -> tuple[bool, list[Order]]:
    """Whether an operator copies to make its results a view could not be, and how they lie."""
    plain = [Order(tuple(range(len(meta.shape) if meta else 0))) for meta in op.results]
    if op.kind != "call" or not given:
        return False, plain
    stem = op.target.removeprefix("aten.").partition(".")[0]
    first = given[0]
    if stem == "scaled_dot_product_attention" and plain and len(plain[0].dims) == 4:
        return False, [Order((0, 2, 1, 3))]  # torch's kernels write [batch, queries, heads, …]
    if stem in _ORDERS:
        return stem == "clone" or not first.plain, plain
    if stem in _PERMUTES:
        return False, [_permuted(op, graph, first)]
    if stem in _CUTS:
        return False, [Order(order.dims, True) for order in plain] if first.plain else plain
    if family == "view":
        merged = len(plain[0].dims) < len(first.dims)
        in_order = first.dims == tuple(range(len(first.dims)))
        return stem == "reshape" and not in_order and merged, plain
    if family in _SAME_SHAPE and len(plain[0].dims) == len(first.dims):
        return False, [Order(first.dims)] * len(plain)
    return False, plain


def _permuted(op: Op, graph: OpGraph, order: Order) -> Order:
    """The order of a permuted tensor's dimensions: which new dimension each old one became."""
    rank = len(order.dims)
    moved = _moves(Call.of(op, graph), rank)
    place = {old: new for new, old in enumerate(moved)}
    return Order(tuple([place[dim] for dim in order.dims]), order.gaps)


def _moves(call: Call, rank: int) -> list[int]:
    """For each dimension of a permuted result, which of the operand's it is."""
    dims = list(range(rank))
    if call.target == "aten.permute.default":
        given = call.arg(1, "dims")
        return [d % rank for d in given] if isinstance(given, tuple) else dims
    if call.target == "aten.movedim.int":
        source, target = (
            call.int_arg(i, n, 0) % rank for i, n in ((1, "source"), (2, "destination"))
        )
        dims.insert(target, dims.pop(source))
    elif rank > 1:
        swap = call.target == "aten.transpose.int"
        a, b = (call.int_arg(1, "dim0", 0), call.int_arg(2, "dim1", 1)) if swap else (-2, -1)
        dims[a % rank], dims[b % rank] = dims[b % rank], dims[a % rank]
    return dims
