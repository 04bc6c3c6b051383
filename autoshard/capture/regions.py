"""Lay open the regions of an exported graph: `torch.no_grad()` and `torch.autocast` blocks.

What an operator takes where gradients are off is detached, so that none flows through it. What it takes
in an autocast block is cast as autocast would have.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autoshard.capture.autocast import casts
from autoshard.capture.gradients import carrying
from autoshard.capture.memory import written
from autoshard.compat import GRAD, OpOverload
from autoshard.errors import CaptureError

aten = torch.ops.aten
GRAD_REGION, AUTOCAST_REGION = "wrap_with_set_grad_enabled", "wrap_with_autocast"


@dataclass(frozen=True)
class _Mode:
    """In what kind of region an operator runs: with gradients or not, and under which autocast."""

    grad: bool = True
    autocast: tuple[str, torch.dtype] | None = None


def inline_regions(module: GraphModule, trained: Collection[str]) -> None:
    """Replace each region by its operators.

    Args:
        module: rewritten in place.
        trained: names of the placeholders that take a gradient.

    Raises:
        CaptureError: it cannot be told what autocast casts for some operator.
    """
    regions = [node for node in module.graph.nodes if _kind(node)]
    for node in regions:
        _lay_open(module, node, {}, _Mode(), node)
    if regions:
        _detach(module.graph, trained)


def _kind(node: Node) -> str:
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name if name in (GRAD_REGION, AUTOCAST_REGION) else ""


def _lay_open(
    owner: GraphModule, node: Node, values: dict[Node, Any], mode: _Mode, before: Node
) -> None:
    """Put the operators of the region `node` before `before`, and give on its results.

    Args:
        owner: the module that the region's body is in.
        node: the region, in the graph of `owner`.
        values: for nodes of that graph, what they are in the graph that is written.
        mode: the region around it.
        before: where operators are put.
    """
    body_name, given, inside = _region(node, mode)
    body = owner.get_submodule(body_name)
    assert isinstance(body, GraphModule)
    slots = iter([values.get(item, item) if isinstance(item, Node) else item for item in given])
    inner: dict[Node, Any] = {}
    for op in body.graph.nodes:
        if op.op == "placeholder":
            inner[op] = next(slots)
        elif op.op == "output":
            results = [inner.get(r, r) for r in map(_itself, op.args[0])]
            _give(node, results, values, outermost=node is before)
        elif _kind(op):
            _lay_open(body, op, inner, inside, before)
        elif op.op == "call_function" and op not in inner:
            inner[op] = _copy(op, inner, inside, before)
    if node is before:
        node.graph.erase_node(node)


def _region(node: Node, mode: _Mode) -> tuple[str, list[Any], _Mode]:
    """The name of a region's body, what it takes, and the mode inside."""
    if _kind(node) == GRAD_REGION:
        enabled, body, *given = node.args
        return str(body.target), given, replace(mode, grad=bool(enabled))  # type: ignore[union-attr]
    device, dtype, enabled, _, body, *given = node.args
    inside = (str(device), dtype) if enabled else None
    return str(body.target), given, replace(mode, autocast=inside)  # type: ignore[union-attr,arg-type]


def _itself(result: Any) -> Any:
    """The tensor that a result is: what is written to in place stays the tensor that it was."""
    while isinstance(result, Node) and (places := written(result)) and places == [result.args[0]]:
        result = places[0]
    return result


def _give(region: Node, results: list[Any], values: dict[Node, Any], *, outermost: bool) -> None:
    """Let those who take a region's results take what they are now."""
    for user in list(region.users):
        index = user.args[1]
        assert isinstance(index, int)
        if outermost:
            user.replace_all_uses_with(results[index])
            region.graph.erase_node(user)
        else:
            values[user] = results[index]


def _copy(op: Node, inner: dict[Node, Any], mode: _Mode, before: Node) -> Node:
    graph = before.graph
    with graph.inserting_before(before):
        made = graph.node_copy(op, inner.__getitem__)
        made.meta.setdefault(GRAD, mode.grad)
        if mode.autocast is not None:
            _cast_arguments(graph, made, *mode.autocast)
    return made


def _cast_arguments(graph: Graph, node: Node, device: str, dtype: torch.dtype) -> None:
    found = casts(node, device, dtype)
    if found is None:
        raise CaptureError(
            f"What autocast casts for {node.target} cannot be told.",
            (node.meta.get("stack_trace") or "").strip(),
            "Cast by hand there, or leave the autocast block for this operator.",
        )

    def cast(source: Node) -> Node:
        to = found.get(source)
        if to is None:
            return source
        with graph.inserting_before(node):
            made = graph.call_function(aten.to.dtype, (source, to))
        made.meta = {**node.meta, "val": source.meta["val"].to(to)}
        return made

    node.args = torch.fx.map_arg(node.args, cast)
    node.kwargs = torch.fx.map_arg(node.kwargs, cast)


def _detach(graph: Graph, trained: Collection[str]) -> None:
    """Detach what operators take where gradients were off."""
    without = {node for node in graph.nodes if not node.meta.get(GRAD, True)}
    for node in [n for n in graph.nodes if n in without]:
        same = _given_back(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            without.remove(node)
    carries = carrying(graph, trained, ignore=without)
    detached: dict[Node, Node] = {}

    def taken(value: Node) -> Node:
        traced = value.meta.get("val")
        if value not in carries or not isinstance(traced, torch.Tensor):
            return value
        if not (traced.is_floating_point() or traced.is_complex()):
            return value
        if value not in detached:
            with graph.inserting_after(value):
                detached[value] = graph.call_function(aten.detach.default, (value,))
            detached[value].meta = dict(value.meta)
        return detached[value]

    for node in [n for n in graph.nodes if n in without and n.op == "call_function"]:
        node.args = torch.fx.map_arg(node.args, taken)
        node.kwargs = torch.fx.map_arg(node.kwargs, taken)


def _given_back(node: Node) -> Node | None:
    """The operand whose very tensor an operator gives back, as `x.to(x.dtype)` and `x.contiguous()` may.

    Traced, such a tensor goes by the name of its last result: those who take it after a block without
    gradients seem to take a result of the block. They take the tensor, and its gradient flows.
    """
    result = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(result, torch.Tensor):
        return None
    values = {source: source.meta.get("val") for source in node.all_input_nodes}
    alike = [
        source
        for source, value in values.items()
        if isinstance(value, torch.Tensor)
        and (value.shape, value.dtype, value.device) == (result.shape, result.dtype, result.device)
    ]
    if not alike or written(node) or any(value is None for value in values.values()):
        return None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
    with torch.no_grad():
        again = node.target(*args, **kwargs)
    return next((source for source in alike if values[source] is again), None)
