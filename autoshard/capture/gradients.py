"""Which tensors of a graph a gradient may flow through."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from autoshard.capture.memory import Memory, written

aten = torch.ops.aten

_STOPS = frozenset({
    aten.detach.default, aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default,
    aten.full_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty.default, aten.floor_divide.default, aten.sign.default,
})  # fmt: skip
"""Operators whose results have no gradient, or a gradient of zero, whatever they take."""


def carrying(graph: Graph, trained: Collection[str], *, ignore: Collection[Node] = ()) -> set[Node]:
    """The nodes through whose results a gradient may flow.

    A tensor that is written to carries what is written: zeros that a product is copied into, and all that
    shares their memory.

    Args:
        graph: all of whose nodes are looked at.
        trained: names of the placeholders that take a gradient.
        ignore: operators that run without gradients.
    """
    writers = {node: places for node in graph.nodes if (places := written(node))}
    memory = Memory(graph) if writers else None
    found: set[Node] = set()
    shared: set[Node] = set()
    grown = True
    while grown:
        before = len(found), len(shared)
        for node in graph.nodes:
            if node.op == "placeholder":
                carries = node.name in trained
            else:
                takes = any(source in found for source in node.all_input_nodes)
                carries = takes and node.target not in _STOPS and node not in ignore
            if carries and memory is not None and node in writers:
                shared.update(memory.root(place) for place in writers[node])
            if carries or (shared and memory is not None and memory.root(node) in shared):
                found.add(node)
        grown = memory is not None and before != (len(found), len(shared))
    return found
