"""Find where a sharded program first computes something else than the model, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from autoshard.compat import tree_flatten
from autoshard.graph import Op, Ref
from autoshard.placement import Layout, Partial, Replicate, Shard, format_layout
from autoshard.runtime import simulator
from autoshard.runtime.backend import graph_module
from autoshard.runtime.errors import relative, weighted_sum
from autoshard.runtime.slicing import join

if TYPE_CHECKING:
    from autoshard.runtime.compare import Trial
    from autoshard.runtime.sharded_module import Prepared, ShardedModule


def first_divergence(sharded: ShardedModule, trial: Trial, tolerance: float) -> str | None:
    """The first operator whose value, put together from the ranks', differs; None where none does.

    Where all values are right, the last operator whose result has another gradient: the fault is in the
    backward of those that take it. Both the captured graph and the rank's program are run on the model's
    first parameters.
    """
    prepared = sharded.first_prepared
    runs = _run(prepared, trial, backward=False)
    for op in prepared.captured.graph.ops:
        for index in range(len(op.results)):
            if text := _difference(op, index, prepared, runs, tolerance):
                return text
    runs = _run(prepared, trial, backward=True)
    for op in reversed(prepared.captured.graph.ops):
        for index in range(len(op.results)):
            if text := _difference(op, index, prepared, runs, tolerance):
                return text
    return None


@dataclass(frozen=True)
class _Runs:
    """Values, or gradients: of the whole graph by node name, and of every rank by the program's node."""

    expected: dict[str, Any]
    found: dict[Node, list[Any]]
    gradients: bool


def _run(prepared: Prepared, trial: Trial, *, backward: bool) -> _Runs:
    captured, program = prepared.captured, prepared.program
    expected: dict[str, Any] = {}
    found: dict[Node, list[Any]] = {}
    keep = _keep_gradient if backward else _copy
    with nullcontext() if backward else torch.no_grad():
        torch.manual_seed(0)
        wanted = _whole_run(captured.fx_graph, _tensors(prepared, trial), expected, keep)
        torch.manual_seed(0)
        whole = _tensors(prepared, trial)
        leaves = [
            (simulator.written if leaf.written else simulator.spread)(
                whole[leaf.op.name], leaf.layout, program.mesh, leaf.op.target
            )
            for leaf in program.leaves
        ]
        made = simulator.run(
            program.graph,
            leaves,
            program.mesh,
            lambda node, values: found.__setitem__(node, [keep(v) for v in values]),
        )
        results = [simulator.collect(item) for item in made]
    if backward:
        for outs in (wanted, results):
            total = weighted_sum([x for x in outs if isinstance(x, Tensor)])
            if total is not None:
                total.backward()
        expected = {name: _gradient(value) for name, value in expected.items()}
        found = {node: [_gradient(v) for v in values] for node, values in found.items()}
    return _Runs(expected, found, backward)


def _tensors(prepared: Prepared, trial: Trial) -> dict[str, Tensor]:
    """What the program takes, by op name: copies, for it may write to them."""
    captured = prepared.captured
    flat = tree_flatten((trial.args, trial.kwargs))[0]
    named = dict(zip([name for name, _ in captured.inputs], flat, strict=True))
    own = {n: t for source in (trial.model.named_parameters, trial.model.named_buffers)
           for n, t in source(remove_duplicate=False)}  # fmt: skip
    stored = {
        op.name: own[op.fqns[0]] for op in captured.graph.ops if op.kind in ("parameter", "buffer")
    }
    given = {n: v for n, v in named.items() if isinstance(v, Tensor)}
    return {
        name: x.detach().clone().requires_grad_(x.requires_grad)
        for name, x in {**captured.tensors, **stored, **given}.items()
    }


def _whole_run(
    graph: torch.fx.Graph,
    leaves: dict[str, Tensor],
    kept: dict[str, Any],
    keep: Callable[[Any], Any],
) -> tuple[Any, ...]:
    """Run the graph whole; every node's value goes to `kept`, by name."""

    class Keeper(Interpreter):
        def run_node(self, n: Node) -> Any:
            leaf = n.op == "placeholder" and n.name in leaves
            value = leaves[n.name] if leaf else super().run_node(n)
            if n.op != "output":
                several = isinstance(value, (tuple, list))
                kept[n.name] = [keep(v) for v in value] if several else keep(value)
            return value

    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    return Keeper(graph_module(graph)).run(*[leaves.get(name) for name in names])


def _copy(value: Any) -> Any:
    """A value as it is now: operators may write to it later."""
    return value.clone() if isinstance(value, Tensor) else value


def _keep_gradient(value: Any) -> Any:
    if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
        value.retain_grad()
    return value


def _gradient(value: Any) -> Any:
    if isinstance(value, list):
        return [_gradient(item) for item in value]
    return value.grad if isinstance(value, Tensor) and value.requires_grad else None


def _difference(
    op: Op, index: int, prepared: Prepared, runs: _Runs, tolerance: float
) -> str | None:
    ref, wanted = Ref(op.name, index), runs.expected.get(op.name)
    if isinstance(wanted, (tuple, list)):
        wanted = wanted[index]
    layouts = prepared.program.layouts
    if ref not in layouts or not isinstance(wanted, Tensor) or layouts[ref][1] not in runs.found:
        return None
    layout, node = layouts[ref]
    values = runs.found[node]
    if not all(isinstance(v, Tensor) for v in values):
        return None
    error = relative(_whole(values, layout, gradients=runs.gradients), wanted)
    if error <= tolerance:
        return None
    what = "the gradient of " if runs.gradients else ""
    where = f" in {op.module}" if op.module else ""
    source = f", at {op.source}" if op.source else ""
    return f"{what}{op.name} ({op.target}{where}), held as {format_layout(layout)}: off by {error:.3g}{source}"


def _whole(values: list[Tensor], layout: Layout, *, gradients: bool) -> Tensor:
    """The whole tensor, or its gradient: Partial's is the same everywhere, Replicate's are shares."""
    state = layout[0]
    if isinstance(state, Shard):
        return join(values, state.dim, state.blocks)
    if isinstance(state, Replicate if gradients else Partial):
        return torch.stack(list(values)).sum(0)
    return values[0]
