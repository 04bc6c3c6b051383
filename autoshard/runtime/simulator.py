"""Run a program for all ranks in one process, in lockstep: node after node, on every rank.

The whole is one autograd graph, so a plain `backward()` runs every rank's backward, conversions and all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autoshard.compat import schema_arguments
from autoshard.errors import VerifyError
from autoshard.mesh import Mesh
from autoshard.placement import I, Layout, Shard
from autoshard.runtime.communicator import Simulator
from autoshard.runtime.operators import IMPLEMENTATIONS, is_ours
from autoshard.runtime.slicing import join, take

Ranks = list[Tensor]
Watch = Callable[[Node, list[Any]], None]


def run(
    graph: Graph, leaves: Sequence[Ranks], mesh: Mesh, watch: Watch | None = None
) -> list[Ranks]:
    """Run `graph` on every rank of a one-axis mesh.

    Args:
        graph: a program's graph.
        leaves: for each placeholder, one tensor a rank.
        mesh: the axis.
        watch: called with each node and its value on every rank, as it is computed.

    Returns:
        For each result, one tensor a rank.
    """
    comms = {axis.name: Simulator(axis.size) for axis in mesh.axes}
    values: dict[Node, list[Any]] = {}
    given = iter(leaves)
    last = _last_uses(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = list(next(given))
        elif node.op == "output":
            return [values[item] for item in node.args[0]]
        elif is_ours(node.target):
            values[node] = _ours(node, values, comms)
        else:
            values[node] = _on_each(node, values, range(mesh.size))
        if watch is not None:
            watch(node, values[node])
        for done in last.get(node, ()):
            del values[done]
    return []


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """For each node, the nodes that nothing needs after it."""
    seen: set[Node] = set()
    found: dict[Node, list[Node]] = {}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                found.setdefault(node, []).append(used)
    return found


def _ours(node: Node, values: dict[Node, list[Any]], comms: dict[str, Simulator]) -> list[Any]:
    """A conversion or lowering, on all ranks at once."""
    *args, axis = node.args
    comm = comms[str(axis)]
    name = node.target.__name__.partition(".")[0]  # type: ignore[union-attr]
    schema = schema_arguments(node.target)
    lists = [
        values[a] if isinstance(a, Node) else [a] * comm.size if "Tensor" in str(s.type) else a
        for a, s in zip(args, schema, strict=False)
    ]
    return IMPLEMENTATIONS[name](comm, *lists)


def _on_each(node: Node, values: dict[Node, list[Any]], ranks: range) -> list[Any]:
    """A plain operator on each rank; one that draws random numbers draws the same on every rank."""
    target: Any = node.target
    random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    state = torch.get_rng_state() if random else None
    found = []
    for rank in ranks:
        args = torch.fx.map_arg(node.args, lambda n: values[n][rank])  # noqa: B023
        kwargs = torch.fx.map_arg(node.kwargs, lambda n: values[n][rank])  # noqa: B023
        if state is not None:
            torch.set_rng_state(state)
        found.append(target(*args, **kwargs))
    return found


# --- between the whole tensors of the user and those of the ranks -------------------------------


class _Spread(torch.autograd.Function):
    """One whole tensor → each rank's, and the ranks' gradients → the whole tensor's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, n: int, name: str) -> tuple[Tensor, ...]:
        ctx.layout, ctx.name = layout, name
        return tuple(_pieces(x, layout, n))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        state = ctx.layout[0]
        if isinstance(state, Shard):
            return join(gradients, state.dim, state.blocks), None, None, None
        _check_same([g.detach() for g in gradients], ctx.name)
        return collect(list(gradients)), None, None, None


class _Collect(torch.autograd.Function):
    """Each rank's copy of one Invariant tensor → the tensor; its gradient → every rank."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        ctx.count = len(xs)
        return xs[0].view_as(xs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(_Spread.apply(gradients[0], (I,), ctx.count, "a result's gradient"))


def _pieces(x: Tensor, layout: Layout, n: int) -> Ranks:
    state = layout[0]
    if isinstance(state, Shard):
        return [take(x, state.dim, state.blocks, r, n) for r in range(n)]
    return [x.view_as(x) for _ in range(n)]


def spread(x: Tensor, layout: Layout, mesh: Mesh, name: str) -> Ranks:
    """Each rank's part of a whole tensor, differentiably.

    Raises (in backward):
        VerifyError: the ranks' gradients of an Invariant tensor differ.
    """
    return list(_Spread.apply(x, layout, mesh.size, name))


def collect(xs: Ranks) -> Tensor:
    """The whole tensor of which every rank holds a copy, differentiably."""
    return _Collect.apply(*xs)


def written(x: Tensor, layout: Layout, mesh: Mesh, name: str = "") -> Ranks:
    """Each rank's part of a tensor that operators write to: what is written reaches `x`, once.

    A weight is whole, and rank 0's gradient is its own: the others' are equal, and dropped.
    """
    parts = _pieces(x, layout, mesh.size)
    if isinstance(layout[0], Shard):
        return parts
    copies = [x.detach().clone().requires_grad_(x.requires_grad) for _ in parts[1:]]
    return [x.view_as(x) if x.requires_grad else x, *copies]


def _check_same(gradients: Sequence[Tensor], name: str) -> None:
    first = gradients[0]
    bound = 1e-5 * float(first.abs().max()) + 1e-30 if first.numel() else 0.0
    for rank, other in enumerate(gradients[1:], 1):
        worst = float((first - other).abs().max()) if first.numel() else 0.0
        if worst > bound:
            raise VerifyError(
                f"Ranks 0 and {rank} have different gradients of one tensor (by {worst:.3g}).",
                name,
                "This is a bug in autoshard: please report the model and the plan.",
            )
