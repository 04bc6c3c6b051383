"""Memory whose layout matters: what may be a view or a copy, and what reads memory by strides.

`x.reshape(-1)` shares x's memory where x is contiguous, and is a copy elsewhere: a write to it reaches x, or not.
`as_strided` reads whatever lies there. A sharded program may leave a tensor contiguous that was not so in
eager, so such memory begins with a copy that has the strides of the capture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from autoshard.capture.memory import BY_STRIDES, Memory, shared_operands, written

aten = torch.ops.aten

_VIEW_OR_COPY = frozenset({
    aten.reshape.default, aten.reshape_as.default, aten.contiguous.default, aten.ravel.default,
    aten.flatten.using_ints,
})  # fmt: skip


def keep_layouts(graph: Graph) -> None:
    """Give memory whose layout matters the strides that it was captured with."""
    found = [n for n in graph.nodes if n.target in BY_STRIDES]
    writers = [n for n in graph.nodes if written(n)]
    if not found and not writers:
        return
    memory = Memory(graph)
    roots = {memory.root(node) for node in found}
    for root in {memory.root(node) for writer in writers for node in written(writer)}:
        if any(member.target in _VIEW_OR_COPY for member in memory.members[root]):
            roots.add(root)
    makers = [n for n in graph.nodes if memory.root(n) in roots and _makes(n, memory)]
    for node in makers:
        _lay_out(graph, node)


def _makes(node: Node, memory: Memory) -> bool:
    """Whether a call makes its memory, rather than pass on that of an operand.

    What functionalizing has derived is told by its schema: its `val` is the memory that it wrote to before.
    """
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if "derived" in node.meta:
        return not any(True for _ in shared_operands(node))
    root = memory.root(node)
    return not any(memory.root(other) is root for other in node.all_input_nodes)


def _lay_out(graph: Graph, node: Node) -> None:
    """Let a copy with the strides of the captured value take the place of a call's result.

    It is contiguous in the order of the strides, and viewed in the order of the dimensions.
    """
    val: Any = node.meta["val"]
    order = sorted(range(val.dim()), key=lambda dim: -val.stride(dim))
    inverse = sorted(range(val.dim()), key=lambda at: order[at])
    ordered = val.permute(order)
    users, plain = list(node.users), dict[str, Any](memory_format=torch.contiguous_format)
    made = node
    for target, args, kwargs, seen in (
        (aten.permute.default, (order,), {}, ordered),
        (aten.clone.default, (), plain, ordered.clone(memory_format=torch.contiguous_format)),
        (aten.permute.default, (inverse,), {}, None),
    ):
        with graph.inserting_after(made):
            made = graph.call_function(target, (made, *args), kwargs)
        made.meta = {**node.meta, "val": val if seen is None else seen, "derived": True}
    for user in users:
        user.replace_input_with(node, made)
