"""Rewrite a captured graph into the program that each rank runs.

Every operator is emitted with its operands in the states its strategy wants, one conversion for each
distinct want of a tensor, and with arguments that hold sizes changed to the rank's.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from autoshard.capture import Captured
from autoshard.emit import BIASED, LOCAL_ARGUMENTS, Site
from autoshard.emit_lowered import EMITTERS
from autoshard.graph import Op, Ref, TensorMeta
from autoshard.mesh import Mesh
from autoshard.placement import Layout, Shard, conversion, local_shape
from autoshard.planner import Decided
from autoshard.runtime.operators import operator


@dataclass(frozen=True)
class Leaf:
    """A tensor that the program takes: its op, and the layout in which each rank holds it."""

    op: Op
    layout: Layout
    written: bool


@dataclass(frozen=True)
class Program:
    """What one rank runs: a graph whose inputs are `leaves` in order, whose results are tensors.

    Attributes:
        graph: in it, conversions name mesh axes.
        leaves: parameters, buffers and constants, then inputs.
        mesh: the axes.
        layouts: for each tensor of the original graph, how it is laid out and the node that holds it.
    """

    graph: Graph
    leaves: tuple[Leaf, ...]
    mesh: Mesh
    layouts: dict[Ref, tuple[Layout, Node]]


def rewrite(captured: Captured, decided: Decided, device: torch.device | None = None) -> Program:
    """The program of a decision; `device` replaces the device that the graph was captured on."""
    writer = _Writer(captured, decided, device)
    for op in captured.graph.ops:
        writer.write(op)
    writer.graph.eliminate_dead_code(lambda node: node in writer.writing or node.is_impure())
    writer.graph.lint()
    return Program(writer.graph, tuple(writer.leaves), decided.strategies.mesh, writer.layouts)


class _Writer:
    """Writes the new graph, operator after operator."""

    def __init__(self, captured: Captured, decided: Decided, device: torch.device | None) -> None:
        self.graph = Graph()
        self.leaves: list[Leaf] = []
        self.writing: set[Node] = set()  # for a batch norm's schema does not say that it writes
        self.layouts: dict[Ref, tuple[Layout, Node]] = {}
        self._captured = captured
        self._decided = decided
        self._device = device
        self._mesh = decided.strategies.mesh
        self._nodes = {node.name: node for node in captured.fx_graph.nodes}
        self._converted: dict[tuple[Ref, Layout], Node] = {}
        self._written = self._written_leaves()

    def _written_leaves(self) -> set[str]:
        """The stored tensors that some operator writes to."""
        folded, found = self._decided.folded, set()
        for op in self._captured.graph.ops:
            index = folded.class_of[op.name]
            for position, ref in enumerate(op.operands):
                if (index, position) in self._decided.strategies.locked:
                    found.add(ref.op)
        return found

    def write(self, op: Op) -> None:
        """Emit one operator of the original graph."""
        if op.kind == "output":
            refs = [ref for ref in self._captured.outputs if isinstance(ref, Ref)]
            states = dict(zip(op.operands, self._decided.strategy(op.name).operands, strict=True))
            self.graph.output(tuple(self.value(ref, states[ref]) for ref in refs))
        elif op.kind != "call":
            self._leaf(op)
        else:
            self._call(op)
            if op.writes:
                self._converted.clear()  # what was converted before is older than the memory

    def value(self, ref: Ref, want: Layout) -> Node:
        """The node that holds tensor `ref` in the layout `want`."""
        have, node = self.layouts[ref]
        if have == want:
            return node
        if (ref, want) not in self._converted:
            shape = self._captured.graph.meta(ref).shape
            self._converted[ref, want] = self._convert(node, shape, have, want)
        return self._converted[ref, want]

    def _convert(self, node: Node, shape: tuple[int, ...], have: Layout, want: Layout) -> Node:
        for axis, h, w in zip(self._mesh.axes, have, want, strict=True):
            found = conversion(h, w)
            if found is not None:
                cuts = [
                    item
                    for p in (h, w)
                    if isinstance(p, Shard)
                    for item in (p.dim, p.blocks, shape[p.dim])
                ]
                args = (node, *cuts, axis.name)
                node = self.graph.call_function(operator(found.name), args)
        return node

    def _leaf(self, op: Op) -> None:
        if not op.results:
            return  # an input that is no tensor: its value is in the graph already
        layout = self._decided.strategy(op.name).results[0]
        node = self.graph.placeholder(op.name)
        self.layouts[Ref(op.name)] = layout, node
        self.leaves.append(Leaf(op, layout, op.name in self._written))

    def _call(self, op: Op) -> None:
        strategy, source = self._decided.strategy(op.name), self._nodes[op.name]
        operands = [
            self.value(ref, want) for ref, want in zip(op.operands, strategy.operands, strict=True)
        ]
        given = iter(operands)
        args = [self._argument(a, given) for a in source.args]
        kwargs = {k: self._argument(v, given) for k, v in source.kwargs.items()}
        metas = self._captured.graph.operand_metas(op)
        site = Site(
            graph=self.graph,
            target=source.target,
            args=args,
            kwargs=kwargs,
            results=self._local_shapes(op.results, strategy.results),
            operands=self._local_shapes(metas, strategy.operands),
            wholes=tuple(meta.shape for meta in metas),
            axes=self._split_axes((*strategy.operands, *strategy.results)),
            mesh=self._mesh,
            cuts=self._uneven(op.results, strategy.results),
            taken=self._uneven(metas, strategy.operands),
            made=tuple(meta.shape if meta else () for meta in op.results),
        )
        if source.target in LOCAL_ARGUMENTS and not strategy.lowering:
            LOCAL_ARGUMENTS[source.target](site)
        made = self._with_bias(op, source, operands) or EMITTERS[strategy.lowering](site)
        made.meta = {
            k: source.meta[k] for k in ("stack_trace", "nn_module_stack") if k in source.meta
        }
        if op.writes:
            self.writing.add(made)
        self._results(op, strategy.results, made, source)

    def _with_bias(self, op: Op, source: Node, operands: list[Node]) -> Node | None:
        """Join a bias that capture split off with its product again, where nothing came between."""
        if not source.meta.get("bias"):
            return None
        product, bias = operands
        alone = len(self._captured.graph.consumers[op.operands[0]]) == 1
        if not alone or product.target not in BIASED:
            return None  # a conversion reduced the product first, or someone else takes it too
        target, args = BIASED[product.target](product.args, bias)
        made = self.graph.call_function(target, args)
        self.graph.erase_node(product)
        return made

    def _local_shapes(
        self, metas: tuple[TensorMeta | None, ...], layouts: tuple[Layout, ...]
    ) -> tuple[tuple[int, ...], ...]:
        return tuple(
            local_shape(meta.shape, layout, self._mesh.sizes) if meta else ()
            for meta, layout in zip(metas, layouts, strict=True)
        )

    def _uneven(
        self, metas: tuple[TensorMeta | None, ...], layouts: tuple[Layout, ...]
    ) -> tuple[tuple[int, int] | None, ...]:
        """For each tensor, the dimension in which ranks have slices of different sizes, and its length."""
        found: list[tuple[int, int] | None] = []
        for meta, layout in zip(metas, layouts, strict=True):
            cuts = [
                (placement.dim, meta.shape[placement.dim])
                for placement, ranks in zip(layout, self._mesh.sizes, strict=True)
                if meta and isinstance(placement, Shard) and meta.shape[placement.dim] % ranks
            ]
            found.append(cuts[0] if cuts else None)
        return tuple(found)

    def _split_axes(self, layouts: tuple[Layout, ...]) -> tuple[str, ...]:
        return tuple(
            axis.name
            for index, axis in enumerate(self._mesh.axes)
            if any(isinstance(layout[index], Shard) for layout in layouts)
        )

    def _argument(self, item: Any, operands: Iterator[Node]) -> Any:
        """An argument with nodes replaced, in order, and the captured device by the real one."""
        if isinstance(item, Node):
            return next(operands)
        if isinstance(item, (list, tuple)):
            return type(item)([self._argument(i, operands) for i in item])
        if isinstance(item, torch.device) and self._device is not None:
            return self._device
        return item

    def _results(self, op: Op, layouts: tuple[Layout, ...], made: Node, source: Node) -> None:
        if not isinstance(source.meta.get("val"), (list, tuple)):
            self.layouts[Ref(op.name)] = layouts[0], made
            return
        for index, layout in enumerate(layouts):
            ref = Ref(op.name, index)
            if ref in self._captured.graph.consumers:
                part = self.graph.call_function(python_operator.getitem, (made, index))
                self.layouts[ref] = layout, part
