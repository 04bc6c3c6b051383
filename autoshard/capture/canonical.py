"""Bring an exported graph into the form that rules and rewriting expect.

Checks of global shapes go, regions are laid open, in-place operators become functional where nothing
else sees them, biases are split from products, and what changes nothing vanishes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autoshard.capture.layouts import keep_layouts
from autoshard.capture.memory import functionalize, updates_statistics, written
from autoshard.capture.regions import inline_regions
from autoshard.capture.simplify import SIMPLER, derive
from autoshard.compat import (
    ASSERTIONS,
    OpOverload,
)

aten = torch.ops.aten


def canonicalize(module: GraphModule, trained: Collection[str]) -> None:
    """Rewrite the module's graph in place; what it computes stays the same.

    Args:
        module: what was exported.
        trained: names of the placeholders that take a gradient.
    """
    graph = module.graph
    _complete_users(module)
    inline_regions(module, trained)
    functionalize(graph)
    keep_layouts(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and (change := _REWRITES.get(node.target)):
            change(graph, node)
    _drop_unused(graph)


def _complete_users(module: GraphModule) -> None:
    """Let every node know its users: export forgets some where it cuts a graph into regions."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            for source in node.all_input_nodes:
                source.users.setdefault(node)


def _drop_unused(graph: Graph) -> None:
    """Erase calls whose results nobody takes, unless they write to memory or draw random numbers."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr") and not _acts(node):
            graph.erase_node(node)


def _acts(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    random = torch.Tag.nondeterministic_seeded in target.tags
    return random or bool(written(node)) or updates_statistics(node)


def _erase(graph: Graph, node: Node) -> None:
    if not node.users:
        graph.erase_node(node)


def _val(node: Node) -> torch.Tensor:
    return node.meta["val"]


def _split_linear(graph: Graph, node: Node) -> None:
    """linear(x, w, b) → linear(x, w) + b: a row-parallel product is reduced before b is added, once."""
    if len(node.args) < 3 or node.args[2] is None:
        return
    x, w, bias = node.args
    _product_plus_bias(graph, node, aten.linear.default, (x, w), bias)


def _split_addmm(graph: Graph, node: Node) -> None:
    bias, x, w = node.args[:3]
    if not node.kwargs:
        _product_plus_bias(graph, node, aten.mm.default, (x, w), bias)


def _split_conv(graph: Graph, node: Node) -> None:
    """As `_split_linear`; the bias is viewed as `[c, 1, …]` so that it broadcasts over space."""
    if len(node.args) < 3 or not isinstance(node.args[2], Node):
        return
    bias, space = node.args[2], _val(node).dim() - 2
    if _val(node).dim() != _val(node.args[1]).dim():  # type: ignore[arg-type]
        return
    shape = [-1] + [1] * space
    seen = derive(graph, node, aten.view.default, (bias, shape), _val(bias).reshape(shape))
    rest = (*node.args[:2], None, *node.args[3:])
    _product_plus_bias(graph, node, node.target, rest, seen)


def _product_plus_bias(graph: Graph, node: Node, target: Any, args: tuple, bias: Any) -> None:
    made = _val(node)
    product = derive(graph, node, target, args, made)
    if _val(bias).dtype != made.dtype:  # autocast casts it in the product that takes it
        bias = derive(graph, node, aten.to.dtype, (bias, made.dtype), _val(bias).to(made.dtype))
    total = derive(graph, node, aten.add.Tensor, (product, bias), made)
    total.meta["bias"] = True
    node.replace_all_uses_with(total)
    graph.erase_node(node)


_CONVS = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)
_REWRITES: dict[Any, Callable[[Graph, Node], None]] = {
    **dict.fromkeys(ASSERTIONS, _erase),
    **SIMPLER,
    aten.linear.default: _split_linear,
    aten.addmm.default: _split_addmm,
    **dict.fromkeys(_CONVS, _split_conv),
}
