"""Find out what memory each operator takes, by running it once on the meta device.

Nothing is computed there and nothing allocated, but autograd saves what it saves, results share the
memory that they share, and temporaries come and go: all of that is counted, for any operator. Equal
calls are run once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.fx import Node

from autoshard.capture.captured import Captured
from autoshard.compat import storage_key, tree_flatten, tree_map
from autoshard.graph import Footprint, Op, OpGraph, TensorMeta
from autoshard.runtime.live_memory import LiveBytes

ATTENTION = "aten.scaled_dot_product_attention.default"
_LSE_BYTES = 4
"""Fused attention keeps the logarithm of each row's sum, in float32."""


def with_footprints(captured: Captured) -> OpGraph:
    """The captured graph, with the footprints of its operators: each is found out when it is asked for."""
    return replace(captured.graph, footprints=_Footprints(captured))


class _Footprints(Mapping[str, Footprint]):
    """The footprints of a graph's calls by name, those that run on meta."""

    def __init__(self, captured: Captured) -> None:
        self._graph = captured.graph
        self._nodes = {node.name: node for node in captured.fx_graph.nodes}
        self._known: dict[Hashable, Footprint | None] = {}

    def __getitem__(self, name: str) -> Footprint:
        op, node = self._graph.by_name[name], self._nodes[name]
        metas = self._graph.operand_metas(op)
        key = (op.target, op.args, op.kwargs, op.results, metas, _strides(node))
        if key not in self._known:
            self._known[key] = _found(op, node, metas)
        found = self._known[key]
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (op.name for op in self._graph.ops if op.kind == "call" and op.name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _found(op: Op, node: Node, metas: Sequence[TensorMeta]) -> Footprint | None:
    if not op.operands:
        return None
    if op.target == ATTENTION:
        return _attention(op, metas)
    with torch.random.fork_rng(devices=()):
        return _run(node, metas)


def _strides(node: Node) -> tuple[tuple[int, ...], ...]:
    return tuple(
        [
            given.meta["val"].stride()
            for given in node.all_input_nodes
            if isinstance(given.meta.get("val"), Tensor)
        ]
    )


def _attention(op: Op, metas: Sequence[TensorMeta]) -> Footprint:
    """Of a fused kernel, as devices choose one: on meta the scores would be made, and kept."""
    result = op.results[0]
    assert result is not None
    if not result.grad:
        return Footprint((False,) * len(metas), (False,), 0, (None,))
    mask = [metas[3]] if len(metas) > 3 else []
    size = _itemsize(result.dtype)
    made = sum(m.numel * size for m in mask if m.dtype == "bool")  # as numbers to add
    rows = result.numel // result.shape[-1]
    return Footprint(
        (True,) * 3 + (True,) * len(mask),
        (True,),
        rows * _LSE_BYTES + made,
        (None,),
        0,
        (None,) * len(metas),
        0,
    )


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


# --- one operator, on meta ------------------------------------------------------------------------


@dataclass
class _Kept:
    """The memory that autograd keeps, by storage."""

    tensors: dict[int, Tensor] = field(default_factory=dict)

    def pack(self, x: Tensor) -> Tensor:
        key = storage_key(x)
        if key is not None:
            self.tensors.setdefault(key, x)
        return x


def _run(node: Node, metas: Sequence[TensorMeta]) -> Footprint | None:
    """None where the operator does not run on meta."""
    try:
        with torch.enable_grad():
            operands = [
                _operand(given, meta.grad)
                for given, meta in zip(_tensors(node), metas, strict=True)
            ]
            return _measured(node, operands)
    except Exception:  # noqa: BLE001 - an operator may refuse meta in any way: then it is estimated
        return None


def _tensors(node: Node) -> Iterator[Tensor]:
    """The fake tensors in a node's arguments, in the order of an op's operands."""
    for item in tree_flatten((node.args, node.kwargs))[0]:
        if isinstance(item, Node):
            yield item.meta["val"]


def _operand(fake: Tensor, grad: bool) -> Tensor:
    """A tensor on meta that lies as `fake` does; one that wants a gradient is no leaf: it may be written to."""
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
    return made.requires_grad_().view_as(made) if grad else made


def _measured(node: Node, operands: list[Tensor]) -> Footprint:
    metas_grad = [x.requires_grad for x in operands]
    owned = [x.detach() for x in operands]  # what is written to is still known by its memory
    edges = [get_gradient_edge(x) if x.requires_grad else None for x in operands]
    places = {storage_key(x): i for i, x in reversed(list(enumerate(owned)))}
    kept = _Kept()
    given = iter(operands)
    args, kwargs = tree_map(
        lambda item: next(given) if isinstance(item, Node) else _on_meta(item),
        (tuple(node.args), dict(node.kwargs)),
    )
    assert callable(node.target)
    with LiveBytes() as live, saved_tensors_hooks(kept.pack, lambda x: x):
        made = node.target(*args, **kwargs)
    results = list(made) if isinstance(made, (tuple, list)) else [made]
    tensors = [x if isinstance(x, Tensor) else None for x in results]
    named = {storage_key(x): i for i, x in reversed(list(enumerate(tensors))) if x is not None}
    beside = sum(
        x.untyped_storage().nbytes()
        for key, x in kept.tensors.items()
        if key not in places and key not in named
    )
    forward = Footprint(
        tuple([storage_key(x) in kept.tensors for x in owned]),
        tuple([x is not None and storage_key(x) in kept.tensors for x in tensors]),
        beside,
        tuple([places.get(storage_key(x)) if x is not None else None for x in tensors]),
        max(0, live.peak_bytes - live.bytes),
    )
    del args, kwargs, operands, made, results
    if not any(metas_grad) or not any(x is not None and x.requires_grad for x in tensors):
        return forward
    return _backward(forward, tensors, edges, (*owned, *kept.tensors.values()))


def _on_meta(item: Any) -> Any:
    return torch.device("meta") if isinstance(item, torch.device) else item


def _backward(
    forward: Footprint,
    results: list[Tensor | None],
    edges: list[GradientEdge | None],
    known: Iterable[Tensor],
) -> Footprint:
    outs = [x for x in results if x is not None and x.requires_grad]
    gradients = [torch.empty_like(x) for x in outs]
    places = {storage_key(x): i for i, x in enumerate(gradients)}
    wanted = [edge for edge in edges if edge is not None]
    with LiveBytes() as live:
        for x in (*gradients, *known):
            live.add(x)
        before = live.bytes
        found = list(torch.autograd.grad(outs, wanted, gradients, allow_unused=True))
        own: dict[int | None, int] = {}
        for x in found:
            if x is not None and storage_key(x) not in places:
                own[storage_key(x)] = x.untyped_storage().nbytes()
        extra = live.peak_bytes - before - sum(own.values())
    del wanted
    which = [i for i, x in enumerate(results) if x is not None and x.requires_grad]
    pairs = iter(found)
    aliases: list[int | None] = []
    for edge in edges:
        x = next(pairs) if edge is not None else None
        place = places.get(storage_key(x)) if x is not None else None
        aliases.append(None if place is None else which[place])
    return replace(forward, gradient_aliases=tuple(aliases), backward_bytes=max(0, extra))
