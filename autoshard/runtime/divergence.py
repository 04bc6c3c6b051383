"""Find where a sharded program first computes something else than the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from autoshard.compat import tree_flatten
from autoshard.graph import Op, Ref
from autoshard.placement import Layout, Shard, format_layout
from autoshard.runtime import simulator
from autoshard.runtime.backend import graph_module
from autoshard.runtime.slicing import join

if TYPE_CHECKING:
    from autoshard.runtime.compare import Trial
    from autoshard.runtime.sharded_module import ShardedModule


def first_divergence(sharded: ShardedModule, trial: Trial, tolerance: float) -> str | None:
    """The first operator whose value, put together from the ranks', differs; None where none does.

    Both the captured graph and the rank's program are run on the model's first parameters.
    """
    prepared = sharded.first_prepared
    captured, program = prepared.captured, prepared.program
    flat = tree_flatten((trial.args, trial.kwargs))[0]
    named = dict(zip([name for name, _ in captured.inputs], flat, strict=True))
    own = {n: t for source in (trial.model.named_parameters, trial.model.named_buffers)
           for n, t in source(remove_duplicate=False)}  # fmt: skip
    stored = {
        op.name: own[op.fqns[0]] for op in captured.graph.ops if op.kind in ("parameter", "buffer")
    }
    whole = {
        **captured.tensors,
        **stored,
        **{n: v for n, v in named.items() if isinstance(v, Tensor)},
    }
    with torch.no_grad():
        torch.manual_seed(0)
        expected = _values(captured.fx_graph, whole)
        torch.manual_seed(0)
        found: dict[Node, list[Any]] = {}
        leaves = [
            simulator.spread(whole[leaf.op.name].clone(), leaf.layout, program.mesh, leaf.op.target)
            for leaf in program.leaves
        ]
        simulator.run(program.graph, leaves, program.mesh, found.__setitem__)
    for op in captured.graph.ops:
        for index in range(len(op.results)):
            text = _difference(op, index, program.layouts, expected, found, tolerance)
            if text:
                return text
    return None


def _values(graph: torch.fx.Graph, leaves: dict[str, Tensor]) -> dict[str, Any]:
    """Every node's value, by name, as the graph computes it whole."""
    kept: dict[str, Any] = {}

    class Keeper(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = (
                leaves[n.name]
                if n.op == "placeholder" and n.name in leaves
                else super().run_node(n)
            )
            kept[n.name] = value.clone() if isinstance(value, Tensor) else value
            return value

    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    Keeper(graph_module(graph)).run(*[leaves.get(name) for name in names])
    return kept


def _difference(
    op: Op,
    index: int,
    layouts: dict[Ref, tuple[Layout, Node]],
    expected: dict[str, Any],
    found: dict[Node, list[Any]],
    tolerance: float,
) -> str | None:
    from autoshard.runtime.compare import relative

    ref, wanted = Ref(op.name, index), expected.get(op.name)
    if isinstance(wanted, (tuple, list)):
        wanted = wanted[index]
    if ref not in layouts or not isinstance(wanted, Tensor) or layouts[ref][1] not in found:
        return None
    layout, node = layouts[ref]
    error = relative(_whole(found[node], layout), wanted)
    if error <= tolerance:
        return None
    where = f" in {op.module}" if op.module else ""
    source = f", at {op.source}" if op.source else ""
    return f"{op.name} ({op.target}{where}), held as {format_layout(layout)}: off by {error:.3g}{source}"


def _whole(values: list[Tensor], layout: Layout) -> Tensor:
    state = layout[0]
    if isinstance(state, Shard):
        return join(values, state.dim, state.blocks)
    if str(state) == "P":
        return torch.stack(list(values)).sum(0)
    return values[0]
