"""Which tensors of a graph may share memory, and which operators write to them.

Operators that write become functional where nothing else sees the memory; the rest stay as they are, and
all that may share memory with what they write to is pinned: it runs whole on every rank, as in eager.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from autoshard.compat import aliased_arguments, functional_twin, in_place_arguments, storage_key

aten = torch.ops.aten

_MAYBE_THE_SAME = frozenset({
    aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default, aten.type_as.default, aten.einsum.default,
    aten.meshgrid.default, aten.meshgrid.indexing, aten.broadcast_tensors.default,
    aten.atleast_1d.Sequence, aten.atleast_2d.Sequence, aten.atleast_3d.Sequence,
})  # fmt: skip
"""Operators that may give their operand back, or views of it, though their schema doesn't say so."""

BY_STRIDES = frozenset({
    aten.as_strided.default, aten.as_strided_.default, aten.as_strided_scatter.default,
    aten.as_strided_copy.default,
})  # fmt: skip
"""Operators whose results depend on how their operand lies in memory."""


class Memory:
    """The nodes of a graph, grouped by the memory they may share."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {}
        self.members: dict[Node, list[Node]] = {}
        stored: dict[int, Node] = {}
        for node in graph.nodes:
            for other in shared_operands(node):
                self._join(node, other)
            key = storage_key(node.meta.get("val")) if "derived" not in node.meta else None
            if key is not None:
                self._join(node, stored.setdefault(key, node))
        for node in graph.nodes:
            self.members.setdefault(self.root(node), []).append(node)

    def root(self, node: Node) -> Node:
        """The node that stands for all that share memory with `node`."""
        parent = self._parent
        while (above := parent.get(node, node)) is not node:
            parent[node] = parent.get(above, above)
            node = parent[node]
        return node

    def of(self, node: Node) -> list[Node]:
        """All nodes that may share memory with `node`, in order, itself among them."""
        return self.members[self.root(node)]

    def add(self, node: Node, like: Node) -> None:
        """Let a new node share the memory of `like`."""
        self._join(node, like)
        self.members[self.root(like)].append(node)

    def _join(self, a: Node, b: Node) -> None:
        a, b = self.root(a), self.root(b)
        if a is not b:
            self._parent[a] = b


def shared_operands(node: Node) -> Iterator[Node]:
    """The operands that a node's results may share memory with."""
    if node.op != "call_function":
        return
    target = node.target
    if getattr(target, "__name__", "") == "getitem":
        source = node.args[0]
        if isinstance(source, Node) and any(
            True for _ in shared_operands(source)
        ):  # parts of one memory
            yield source
        return
    if target in _MAYBE_THE_SAME:
        yield from node.all_input_nodes
        return
    for index, name in aliased_arguments(target):
        given = node.args[index] if index < len(node.args) else node.kwargs.get(name)
        for item in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(item, Node):
                yield item


def written(node: Node) -> list[Node]:
    """The nodes whose memory an operator writes to."""
    if node.op != "call_function":
        return []
    found = []
    for index, name in in_place_arguments(node.target):
        given = node.args[index] if index < len(node.args) else node.kwargs.get(name)
        given = given if isinstance(given, (list, tuple)) else (given,)
        found += [item for item in given if isinstance(item, Node)]
    return found


def updates_statistics(node: Node) -> bool:
    """Whether a batch norm writes to its running statistics, of which its schema says nothing."""
    if node.target not in (aten.batch_norm.default, aten.instance_norm.default):
        return False
    return bool(node.args[5]) and isinstance(node.args[3], Node)


def functionalize(graph: Graph) -> None:
    """Replace `x.op_(…)` by `op(x, …)` where nothing that shares x's memory is read afterwards."""
    writers = [node for node in graph.nodes if written(node)]
    if not writers:
        return
    memory = Memory(graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in writers:
        target = written(node)
        if target != [node.args[0]] or not _may_be_functional(node, memory, order):
            continue
        made = _functional(graph, node)
        if made is None:
            continue
        for user in list(target[0].users):
            if user is not made and order.get(user, -1) > order[node]:
                user.replace_input_with(target[0], made)
        if made is not node:
            memory.add(made, target[0])
            order[made] = order[node]


def _may_be_functional(node: Node, memory: Memory, order: dict[Node, int]) -> bool:
    """Whether no older tensor of the same memory is read later, and none outlives the call."""
    at, source = order[node], node.args[0]
    assert isinstance(source, Node)
    now, before = node.meta.get("val"), source.meta.get("val")
    if not isinstance(now, torch.Tensor) or not isinstance(before, torch.Tensor):
        return False
    if now.dtype != before.dtype or now.shape != before.shape:
        return False
    for other in memory.of(source):
        if other.op in ("placeholder", "get_attr"):
            return False
        if other is source or other is node or order.get(other, at) > at:
            continue
        if any(order.get(user, at) > at for user in other.users):
            return False
    return True


def _functional(graph: Graph, node: Node) -> Node | None:
    """The node that computes what `node` writes, in its place; None where there is no such operator."""
    if node.target is aten.copy_.default:
        return _copied(graph, node)
    twin = functional_twin(node.target)
    if twin is None:
        return None
    node.target = twin
    node.meta["derived"] = True  # its `val` is the memory that was written to: this has its own
    return node


def _copied(graph: Graph, node: Node) -> Node:
    """`x.copy_(y)` leaves y in x's shape and dtype, in memory of its own."""
    source, like = node.args[1], node.meta["val"]
    assert isinstance(source, Node)
    value = source.meta["val"]
    with graph.inserting_before(node):
        made = source
        if value.dtype != like.dtype:
            made = _call(graph, node, aten.to.dtype, (made, like.dtype))
        if value.shape != like.shape:
            made = _call(graph, node, aten.expand.default, (made, list(like.shape)))
        made = _call(graph, node, aten.clone.default, (made,))
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made


def _call(graph: Graph, like: Node, target: object, args: tuple) -> Node:
    made = graph.call_function(target, args)  # type: ignore[arg-type]
    made.meta = {**like.meta, "derived": True}
    return made


def pinned(graph: Graph) -> set[Node]:
    """The calls that must run whole: all that take part in memory that is written to, or read by strides."""
    writers = [node for node in graph.nodes if written(node)]
    readers = [node for node in graph.nodes if node.target in BY_STRIDES]
    if not writers and not readers:
        return set()
    memory = Memory(graph)
    roots = {memory.root(node) for writer in writers for node in (writer, *written(writer))}
    roots |= {memory.root(node.args[0]) for node in readers}
    found: set[Node] = {*writers, *readers}
    for root in roots:
        # The first makes the memory: it may run as it likes, as long as its result is whole.
        found.update(n for n in memory.members[root] if _takes_part(n, memory, root))
    return found


def _takes_part(node: Node, memory: Memory, root: Node) -> bool:
    """Whether a call passes memory on, rather than make it."""
    return node.op == "call_function" and any(
        memory.root(other) is root for other in node.all_input_nodes
    )
