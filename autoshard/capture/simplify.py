"""Write operators by others, and drop those that change nothing: fewer of them need rules.

Each rewrite leaves what is computed as it is, down to the memory that results share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

aten = torch.ops.aten


def derive(graph: Graph, like: Node, target: Any, args: tuple, val: Any, **kwargs: Any) -> Node:
    """A new node before `like`, at the same place of the model, that makes `val`."""
    with graph.inserting_before(like):
        node = graph.call_function(target, args, kwargs)
    node.meta = {**like.meta, "val": val, "derived": True}
    return node


def _become(graph: Graph, node: Node, other: Node) -> None:
    """Let `other` take the place of `node`."""
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def _val(node: Any) -> Tensor:
    return node.meta["val"]


def _sizes(node: Node) -> list[str]:
    """As text: two sizes that depend on data cannot be compared otherwise."""
    return [str(size) for size in _val(node).shape]


def _drop_cast(graph: Graph, node: Node) -> None:
    """A cast that changes nothing is its operand; else it is a cast to the dtype that it gives."""
    source = node.args[0]
    if not isinstance(source, Node) or node.kwargs.get("copy") or True in node.args[2:]:
        return
    before, after = _val(source), _val(node)
    if before.dtype == after.dtype and before.device == after.device:
        _become(graph, node, source)
    elif node.target in (aten.type_as.default, aten.to.other) and before.device == after.device:
        node.target, node.args, node.kwargs = aten.to.dtype, (source, after.dtype), {}


def _drop_view(graph: Graph, node: Node) -> None:
    """A view of the very shape, or a slice of everything, is its operand."""
    source = node.args[0]
    if isinstance(source, Node) and _sizes(source) == _sizes(node):
        step = node.args[4] if node.target is aten.slice.Tensor and len(node.args) > 4 else 1
        if step == 1:
            _become(graph, node, source)


def _drop_mask(graph: Graph, node: Node) -> None:
    """Dropout that drops nothing gives its operand back."""
    source, probability, train = node.args
    if isinstance(source, Node) and (not train or probability == 0):
        _become(graph, node, source)


def _as(target: Any) -> Callable[[Graph, Node], None]:
    """`reshape_as(x, y)` → `reshape(x, sizes)`: of y, only the shape is taken."""

    def rewrite(graph: Graph, node: Node) -> None:
        node.target, node.args, node.kwargs = target, (node.args[0], list(_val(node).shape)), {}
        _drop_view(graph, node)

    return rewrite


def _new(target: Any, fills: int) -> Callable[[Graph, Node], None]:
    """`x.new_zeros(sizes)` → `zeros(sizes)`: of x, only the dtype and device are taken."""

    def rewrite(graph: Graph, node: Node) -> None:
        made = _val(node)
        args = (list(made.shape), *node.args[2 : 2 + fills])
        node.target, node.args = target, args
        node.kwargs = {"dtype": made.dtype, "device": made.device}

    return rewrite


def _repeat_interleave(graph: Graph, node: Node) -> None:
    """Each element again and again → a new dimension, stretched and merged."""
    source, count, dim = (*node.args, None)[:3]
    dim = node.kwargs.get("dim", dim)
    if not isinstance(source, Node) or not isinstance(count, int) or not isinstance(dim, int):
        return
    value, shape = _val(source), list(_val(node).shape)
    at = dim % value.dim()
    seen = value.unsqueeze(at + 1)
    stretched = [*value.shape[: at + 1], count, *value.shape[at + 1 :]]
    wide = derive(graph, node, aten.unsqueeze.default, (source, at + 1), seen)
    wide = derive(graph, node, aten.expand.default, (wide, stretched), seen.expand(stretched))
    node.target, node.args, node.kwargs = aten.reshape.default, (wide, shape), {}


def _filled(target: Any) -> Callable[[Graph, Node], None]:
    """What a tensor is filled with takes its shape alone."""

    def rewrite(graph: Graph, node: Node) -> None:
        if all(not isinstance(arg, Node) for arg in node.args[1:]):
            node.target = target

    return rewrite


def _tile(graph: Graph, node: Node) -> None:
    """`tile` is `repeat` with as many counts as there are dimensions."""
    source, counts = node.args[:2]
    assert isinstance(counts, (list, tuple))
    missing = _val(source).dim() - len(counts)
    node.target, node.args = aten.repeat.default, (source, [1] * missing + list(counts))


def _broadcast_tensors(graph: Graph, node: Node) -> None:
    """Each tensor, expanded where it has to be."""
    given, shapes = node.args[0], [list(v.shape) for v in node.meta["val"]]
    assert isinstance(given, (list, tuple))
    for user in list(node.users):
        source, shape = given[user.args[1]], shapes[user.args[1]]  # type: ignore[index]
        if not isinstance(source, Node):
            return
        user.target, user.args = aten.expand.default, (source, shape)
        _drop_view(graph, user)


SIMPLER: dict[Any, Callable[[Graph, Node], None]] = {
    aten.to.dtype: _drop_cast,
    aten.to.dtype_layout: _drop_cast,
    aten.to.device: _drop_cast,
    aten.to.other: _drop_cast,
    aten.type_as.default: _drop_cast,
    aten.alias.default: _drop_view,
    aten.slice.Tensor: _drop_view,
    aten.view.default: _drop_view,
    aten.reshape.default: _drop_view,
    aten.expand.default: _drop_view,
    aten.dropout.default: _drop_mask,
    aten.feature_dropout.default: _drop_mask,
    aten.alpha_dropout.default: _drop_mask,
    aten.feature_alpha_dropout.default: _drop_mask,
    aten.reshape_as.default: _as(aten.reshape.default),
    aten.view_as.default: _as(aten.view.default),
    aten.expand_as.default: _as(aten.expand.default),
    aten.new_zeros.default: _new(aten.zeros.default, 0),
    aten.new_ones.default: _new(aten.ones.default, 0),
    aten.new_empty.default: _new(aten.empty.memory_format, 0),
    aten.new_full.default: _new(aten.full.default, 1),
    aten.zero.default: _filled(aten.zeros_like.default),
    aten.fill.Scalar: _filled(aten.full_like.default),
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.tile.default: _tile,
    aten.broadcast_tensors.default: _broadcast_tensors,
}
