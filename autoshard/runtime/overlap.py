"""Products next to their collectives: less waiting and less copying, the numbers are the same.

Column-parallel layers share an input (q, k and v; gate and up). Run one by one, autograd computes each
one's gradients of input and weight, sums the inputs', and only then starts the all-reduce, for which all
then wait. Run as one operator, the inputs' gradients come first, summed by the products themselves; the
all-reduce runs while the weights' gradients are computed.

A row-parallel layer's result is a share that nobody reads but the all-reduce: it is summed where it lies.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn.functional import linear

from autoshard.runtime.collectives import start_all_reduce
from autoshard.runtime.communicator import Distributed
from autoshard.runtime.conversions import invariant_to_replicate, partial_to_invariant
from autoshard.runtime.operators import NAMESPACE, operator


def column_products(x: Tensor, weights: Sequence[Tensor], group: str) -> list[Tensor]:
    """`linear(x, w)` for each of `weights`, split by column: x is Invariant, the results Shard."""
    if torch.is_autocast_enabled(x.device.type):  # it casts inside the operators that it knows
        (x,) = invariant_to_replicate(Distributed(group), [x])
        return [linear(x, w) for w in weights]
    return list(_Column.apply(group, x, *weights))


def row_product(x: Tensor, weight: Tensor, group: str) -> Tensor:
    """`linear(x, weight)`, split by row, summed over the ranks: x is Shard, the result Invariant."""
    if torch.is_autocast_enabled(x.device.type):
        return partial_to_invariant(Distributed(group), [linear(x, weight)])[0]
    return _Row.apply(group, x, weight)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple([linear(x, w) for w in weights])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return _column_again(ctx.group, x, weights, gradients)
        flat, pending = [_rows(g) for g in gradients], None
        if wants_x:
            share = flat[0].mm(weights[0])
            for gradient, weight in zip(flat[1:], weights[1:], strict=True):
                share.addmm_(gradient, weight)
            pending = start_all_reduce(share, ctx.group)
        own = [
            _weight_gradient(g, x) if want else None for g, want in zip(flat, wants, strict=True)
        ]
        return (None, pending().view(x.shape) if pending else None, *own)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, x: Tensor, weight: Tensor) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return start_all_reduce(linear(x, weight), group)()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        wants_x, wants_weight = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # Invariant becomes Replicate, for the gradient of the gradient
            (gradient,) = invariant_to_replicate(Distributed(ctx.group), [gradient])
        to_x = gradient.matmul(weight) if wants_x else None
        return None, to_x, _weight_gradient(_rows(gradient), x) if wants_weight else None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight_gradient(rows: Tensor, x: Tensor) -> Tensor:
    return rows.t().mm(_rows(x))


def _column_again(
    group: str, x: Tensor, weights: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients by operators whose own gradients are recorded."""
    comm = Distributed(group)
    share = sum(g.matmul(w) for g, w in zip(gradients, weights, strict=True))
    (total,) = partial_to_invariant(comm, [share])
    (x,) = invariant_to_replicate(comm, [x])
    return (None, total, *[_weight_gradient(_rows(g), x) for g in gradients])


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("column_products(Tensor x, Tensor[] weights, str axis) -> Tensor[]")
_LIBRARY.define("row_product(Tensor x, Tensor weight, str axis) -> Tensor")
_LIBRARY.impl("column_products", column_products, "CompositeImplicitAutograd")
_LIBRARY.impl("row_product", row_product, "CompositeImplicitAutograd")


# --- the rewrite --------------------------------------------------------------------------------


def overlap(graph: Graph) -> None:
    """Rewrite a rank's graph in place: products with weights, and the conversions next to them."""
    for node in list(graph.nodes):
        if node.target is operator("invariant_to_replicate"):
            _columns(graph, node)
        elif node.target is operator("partial_to_invariant"):
            _row(graph, node)


def _columns(graph: Graph, node: Node) -> None:
    """I → R and the products that take it, where nothing else does."""
    products = list(node.users)
    if not products or not all(_is_product(user) and user.args[0] is node for user in products):
        return
    x, group = node.args
    with graph.inserting_before(products[0]):
        weights = [product.args[1] for product in products]
        made = graph.call_function(operator("column_products"), (x, weights, group))
        made.meta = dict(products[0].meta)
        parts = [
            graph.call_function(python_operator.getitem, (made, i)) for i in range(len(products))
        ]
    for product, part in zip(products, parts, strict=True):
        part.meta = dict(product.meta)
        product.replace_all_uses_with(part)
        graph.erase_node(product)
    graph.erase_node(node)


def _row(graph: Graph, node: Node) -> None:
    """A product and the P → I that takes it, where nothing else does."""
    product, group = node.args
    if not isinstance(product, Node) or not _is_product(product) or len(product.users) > 1:
        return
    with graph.inserting_before(node):
        made = graph.call_function(operator("row_product"), (*product.args, group))
    made.meta = dict(product.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    graph.erase_node(product)


def _is_product(node: Node) -> bool:
    """Whether a node is `linear(x, weight)` with a weight that is there from the start."""
    if node.target is not torch.ops.aten.linear.default or len(node.args) != 2 or node.kwargs:
        return False
    weight = node.args[1]
    return isinstance(weight, Node) and weight.op == "placeholder"
