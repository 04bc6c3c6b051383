"""Bring an exported graph into the form that rules and rewriting expect.

Checks of global shapes go, regions without gradients are laid open, biases are split from products,
casts to the same dtype vanish, and in-place operators become functional where nothing else sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autoshard.compat import functional_twin, in_place_arguments, is_view
from autoshard.errors import CaptureError
from autoshard.graph import Op

aten = torch.ops.aten


def canonicalize(module: GraphModule) -> None:
    """Rewrite the module's graph in place; what it computes stays the same."""
    graph = module.graph
    _inline_regions(module)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _REWRITES.get(node.target, _keep)(graph, node)
    functionalize(graph)
    graph.eliminate_dead_code()


def _keep(graph: Graph, node: Node) -> None:
    """Most operators are in form."""


def _erase(graph: Graph, node: Node) -> None:
    if not node.users:
        graph.erase_node(node)


def _drop_cast(graph: Graph, node: Node) -> None:
    """A cast that changes nothing is its operand."""
    source = node.args[0]
    if (
        isinstance(source, Node)
        and _val(source).dtype == _val(node).dtype
        and not node.kwargs.get("copy")
    ):
        if _val(source).device == _val(node).device and True not in node.args[2:]:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _val(node: Node) -> torch.Tensor:
    return node.meta["val"]


def _derive(
    graph: Graph, like: Node, target: Any, args: tuple, val: torch.Tensor | None = None
) -> Node:
    """A new node where the graph now stands, in the same place of the model as `like`."""
    node = graph.call_function(target, args)
    node.meta = dict(like.meta)
    if val is not None:
        node.meta["val"] = val
    return node


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
    with graph.inserting_before(node):
        seen = _derive(graph, node, aten.view.default, (bias, shape), _val(bias).reshape(shape))
    rest = (*node.args[:2], None, *node.args[3:])
    _product_plus_bias(graph, node, node.target, rest, seen)


def _product_plus_bias(graph: Graph, node: Node, target: Any, args: tuple, bias: Any) -> None:
    with graph.inserting_before(node):
        product = _derive(graph, node, target, args)
        total = _derive(graph, node, aten.add.Tensor, (product, bias))
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
    aten._assert_tensor_metadata.default: _erase,
    aten._assert_scalar.default: _erase,
    aten._assert_async.msg: _erase,
    aten.sym_constrain_range_for_size.default: _erase,
    aten.to.dtype: _drop_cast,
    aten.to.dtype_layout: _drop_cast,
    aten.to.device: _drop_cast,
    aten.type_as.default: _drop_cast,
    aten.linear.default: _split_linear,
    aten.addmm.default: _split_addmm,
    **dict.fromkeys(_CONVS, _split_conv),
}


# --- regions ------------------------------------------------------------------------------------


def _inline_regions(module: GraphModule) -> None:
    """Lay open the bodies of blocks under `torch.no_grad()`: what enters one is detached.

    So are those under an autocast that is switched off.

    Raises:
        CaptureError: a block runs under an autocast that is switched on.
    """
    graph = module.graph
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *given = node.args
            _inline(module, graph, node, body, given, detach=not enabled)
        elif name == "wrap_with_autocast":
            _, _, enabled, _, body, *given = node.args
            if enabled:
                raise _autocast(module, body)
            _inline(module, graph, node, body, given, detach=False)


def _autocast(module: GraphModule, body: Any) -> CaptureError:
    inner = module.get_submodule(str(body.target))
    assert isinstance(inner, GraphModule)
    traces = [node.meta.get("stack_trace") for node in inner.graph.nodes]
    trace = next((trace for trace in traces if trace), "")
    return CaptureError(
        "A part of the model runs under torch.autocast, whose casts are not captured.",
        Op("", "call", "", trace=trace).source,
        "Cast where it is wanted, or convert the model: model.to(torch.bfloat16).",
    )


def _inline(
    module: GraphModule, graph: Graph, node: Node, body_attr: Any, given: list[Any], *, detach: bool
) -> None:
    assert isinstance(body_attr, Node)
    body = module.get_submodule(str(body_attr.target))
    assert isinstance(body, GraphModule)
    _inline_regions(body)
    entering: dict[Node, Node] = {}
    values: dict[Node, Any] = {}
    with graph.inserting_before(node):
        slots = iter(given)
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                outer = next(slots)
                values[inner] = _detached(graph, outer, entering) if detach else outer
            elif inner.op == "output":
                _leave(graph, node, inner.args[0], values)
            else:
                values[inner] = graph.node_copy(inner, lambda n: values[n])
    graph.erase_node(node)


def _detached(graph: Graph, node: Any, known: dict[Node, Node]) -> Any:
    if not isinstance(node, Node) or not isinstance(_val(node), torch.Tensor):
        return node
    if not _val(node).is_floating_point():
        return node
    if node not in known:
        known[node] = _derive(graph, node, aten.detach.default, (node,))
    return known[node]


def _leave(graph: Graph, node: Node, outputs: Any, values: dict[Node, Any]) -> None:
    """Give the region's results to those who take them."""
    for user in list(node.users):
        index = user.args[1]
        assert isinstance(index, int)
        user.replace_all_uses_with(values[outputs[index]])
        graph.erase_node(user)


# --- in-place operators -------------------------------------------------------------------------


def functionalize(graph: Graph) -> None:
    """Replace `x.op_(…)` by `op(x, …)` where no other view of x's memory is read afterwards.

    The rest stay in place; `convert` pins the tensors that share their memory.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    base: dict[Node, Node] = {}
    shared: dict[Node, list[Node]] = {}
    for node in list(graph.nodes):
        root = _root(node, base)
        base[node] = root
        shared.setdefault(root, []).append(node)
    for node in list(graph.nodes):
        if node.op != "call_function" or in_place_arguments(node.target) != (0,):
            continue
        written = node.args[0]
        if not isinstance(written, Node) or base[written].op in ("placeholder", "get_attr"):
            continue
        twin = functional_twin(node.target)
        others = [n for n in shared[base[written]] if n not in (written, node)]
        later = any(
            order[user] > order[node] for n in others for user in n.users if user is not node
        )
        same = isinstance(_val(node), torch.Tensor) and _val(node).dtype == _val(written).dtype
        if twin is None or later or not same:
            continue
        node.target = twin
        for user in list(written.users):
            if order[user] > order[node]:
                user.replace_input_with(written, node)


def _root(node: Node, base: dict[Node, Node]) -> Node:
    """The node whose memory this one may share."""
    if node.op != "call_function":
        return node
    target = node.target
    shares = (
        is_view(target)
        or in_place_arguments(target)
        or getattr(target, "__name__", "") == "getitem"
    )
    first = node.args[0] if node.args else None
    return base.get(first, node) if shares and isinstance(first, Node) else node
