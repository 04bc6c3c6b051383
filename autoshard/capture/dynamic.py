"""Data-dependent shapes inside a model, laid in operators of their own.

Some models choose tokens by their values: an expert's tokens, the audio among the text. What lies between
the choice and the next tensor whose shape is known becomes one operator, which no rule knows: it runs
whole on every rank, and is named among the plan's fallbacks.
"""

from __future__ import annotations

import hashlib
import operator as python_operator
import re
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from autoshard.capture.memory import Memory, written
from autoshard.capture.opaque import define
from autoshard.compat import GRAD, tree_map

NAMESPACE = "data_dependent"
Region = set[Node]
_known: dict[str, Any] = {}


def enclose(module: GraphModule) -> None:
    """Put every part of the graph with data-dependent shapes into an operator; in place.

    A part whose results have such shapes, or that writes to memory that others see, is left as it is.
    """
    for region in _regions(module.graph):
        ordered = [node for node in module.graph.nodes if node in region]
        if _may_be_one(module.graph, ordered):
            _replace(module.graph, ordered)


def _is_dynamic(node: Node) -> bool:
    """Whether a node gives a number read from data, or a tensor whose shape depends on one."""
    val = node.meta.get("val")
    found = val if isinstance(val, (tuple, list)) else (val,)
    return any(
        isinstance(x, torch.SymInt)
        or (isinstance(x, Tensor) and not all(type(size) is int for size in x.shape))
        for x in found
    )


# --- which nodes are one part -------------------------------------------------------------------


def _regions(graph: Graph) -> list[Region]:
    """The parts, each with all that lies on a path from one of its nodes to another."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    found: list[Region] = []
    for node in graph.nodes:
        if node.op != "call_function" or not _is_dynamic(node):
            continue
        found = _joined([*found, {node, *(user for user in node.users if user.op != "output")}])
    settled = False
    while not settled:
        closed = [_closed(region, order) for region in found]
        merged = _joined(closed)
        settled = merged == found
        found = merged
    return sorted(found, key=lambda region: min(order[node] for node in region))


def _joined(regions: list[Region]) -> list[Region]:
    """The regions, those that share a node made one."""
    kept: list[Region] = []
    for region in regions:
        apart = [other for other in kept if not other & region]
        kept = [*apart, region.union(*(other for other in kept if other & region))]
    return kept


def _closed(region: Region, order: dict[Node, int]) -> Region:
    """A region with all that lies between its nodes, and with the parts of results it takes or makes."""
    first, last = min(map(order.__getitem__, region)), max(map(order.__getitem__, region))
    after, before = set(region), set(region)
    between = [node for node in order if first <= order[node] <= last]
    for node in between:
        if any(source in after for source in node.all_input_nodes):
            after.add(node)
    for node in reversed(between):
        if any(user in before for user in node.users):
            before.add(node)
    found = region | (after & before)
    for node in between:
        if node.target is python_operator.getitem and node in found:
            found.add(node.args[0])  # type: ignore[arg-type]
    several = [node for node in found if isinstance(node.meta.get("val"), (tuple, list))]
    return found.union(*(node.users for node in several))


# --- one part as an operator --------------------------------------------------------------------


def _may_be_one(graph: Graph, nodes: list[Node]) -> bool:
    """Whether a part takes and gives tensors of known shapes, and writes to nothing that others see."""
    inside = set(nodes)
    if any(user.op == "output" and _is_dynamic(node) for node in nodes for user in node.users):
        return False
    writers = [node for node in graph.nodes if written(node)]
    if not writers:
        return True
    memory = Memory(graph)
    roots = {memory.root(place) for node in writers for place in written(node)}
    touched = {memory.root(node) for node in nodes} | {
        memory.root(source) for node in nodes for source in node.all_input_nodes
    }
    return all(member in inside for root in roots & touched for member in memory.members[root])


def _replace(graph: Graph, nodes: list[Node]) -> None:
    inside = set(nodes)
    given = list(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside))
    made = [n for n in nodes if any(user not in inside for user in n.users)]
    operator = _operator(_body(nodes, given, made), [n.meta["val"] for n in made])
    with graph.inserting_after(nodes[-1]):
        call = graph.call_function(operator, (given,))
    call.meta = {**nodes[0].meta, "val": [n.meta["val"] for n in made]}
    call.meta["nn_module_stack"] = _common([n.meta.get("nn_module_stack") or {} for n in nodes])
    call.meta[GRAD] = all(n.meta.get(GRAD, True) for n in nodes)
    at = call
    for index, node in enumerate(made):
        with graph.inserting_after(at):
            at = graph.call_function(python_operator.getitem, (call, index))
        at.meta = dict(node.meta)
        for user in [user for user in node.users if user not in inside]:
            user.replace_input_with(node, at)
    for node in reversed(nodes):
        graph.erase_node(node)


def _body(nodes: list[Node], given: list[Node], made: list[Node]) -> Graph:
    """The part as a graph, with names that do not tell where in the model it stands."""
    body, copies = Graph(), {}
    for index, node in enumerate(given):
        copies[node] = body.placeholder(f"x{index}")
    for index, node in enumerate(nodes):
        args: Any = torch.fx.map_arg(node.args, copies.__getitem__)
        kwargs: Any = torch.fx.map_arg(node.kwargs, copies.__getitem__)
        copies[node] = body.create_node(node.op, node.target, args, kwargs, f"n{index}")
    body.output([copies[node] for node in made])
    return body


def _common(stacks: list[dict[str, Any]]) -> dict[str, Any]:
    """The modules that all nodes of a part run in."""
    first = list(stacks[0].items())
    while first and not all(list(stack.items())[: len(first)] == first for stack in stacks):
        first.pop()
    return dict(first)


class _OnDevice(Interpreter):
    """Runs a graph with tensors made on a device, instead of the one it was captured on."""

    def __init__(self, module: GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self._device = device

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator."""
        args, kwargs = tree_map(self._moved, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def _moved(self, value: Any) -> Any:
        return self._device if isinstance(value, torch.device) else value


class _Piece:
    """A part of a graph, to be run: an `opaque.Body`."""

    def __init__(self, body: Graph, results: list[Tensor]) -> None:
        self.random_state: Any = None
        self._module = GraphModule({}, body)
        self._results = [(tuple(x.shape), x.dtype) for x in results]

    def call(self, tensors: list[Tensor]) -> Any:
        return _OnDevice(self._module, tensors[0].device).run(*tensors)

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [x.clone() for x in self.call([t.detach() for t in tensors])]

    def trace(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in self._results]


def _operator(body: Graph, results: list[Tensor]) -> Any:
    """The operator of a part: one for all that are alike, by the same name in every process."""
    text = f"{body}{[(tuple(x.shape), x.dtype) for x in results]}"
    if text not in _known:
        first = next(node for node in body.nodes if node.op == "call_function")
        stem = re.sub(r"\W", "_", str(first.target).removeprefix("aten."))
        name = f"{stem}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        _known[text] = define(NAMESPACE, name, _Piece(body, results))
    return _known[text]
