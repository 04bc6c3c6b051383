"""One rank of `torch.distributed`: parameters are `DTensor`s, the program runs on their local tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx import Graph, GraphModule

from autoshard import placement
from autoshard.compat import local_tensor, strided_shard
from autoshard.errors import MeshError, PlanError
from autoshard.mesh import Mesh
from autoshard.plan_types import Plan
from autoshard.rewrite import Leaf, Program
from autoshard.runtime.backend import graph_module
from autoshard.runtime.operators import is_ours
from autoshard.runtime.slicing import take


def usable(size: int) -> bool:
    """Whether a process group of `size` ranks is initialised."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() == size


class DistributedBackend:
    """This process's rank."""

    def __init__(self, mesh: Mesh, asked: Any, device: torch.device) -> None:
        self._device_mesh = asked if isinstance(asked, DeviceMesh) else _device_mesh(mesh, device)
        self.device = _device(self._device_mesh.device_type)
        self._groups = {
            axis.name: self._device_mesh.get_group(index).group_name
            for index, axis in enumerate(mesh.axes)
        }
        self._locals: dict[int, tuple[Tensor, Tensor]] = {}

    def agree(self, plan: Plan) -> None:
        """Compare the plans' hashes, so that ranks that decided differently stop here, not in a hang.

        Raises:
            PlanError: another rank has another plan.
        """
        mine = hashlib.sha256(plan.to_json().encode()).digest()[:8]
        number = torch.tensor([int.from_bytes(mine, "big", signed=True)], device=self.device)
        least, most = number.clone(), number.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if int(least) != int(most):
            raise PlanError(
                "The ranks have different plans.",
                f"rank {dist.get_rank()}: model {plan.model}, graph {plan.fingerprint}, hardware "
                f"{plan.hardware}, search {plan.search}, inputs {', '.join(plan.inputs)}",
                "Give every rank the same model, inputs and options, or plan once and load the plan.",
            )

    def hold(self, leaf: Leaf, whole: Tensor) -> nn.Parameter | Tensor:
        """This rank's part of an original parameter or buffer, as a `DTensor`."""
        state = leaf.layout[0]
        local = whole.detach()
        if isinstance(state, placement.Shard):
            rank, size = self._device_mesh.get_local_rank(0), self._device_mesh.size(0)
            local = take(local, state.dim, state.blocks, rank, size)
        local = local.to(self.device, copy=True, memory_format=torch.contiguous_format)
        if leaf.op.kind == "buffer" and not isinstance(state, placement.Shard):
            return local
        held = DTensor.from_local(
            local, self._device_mesh, [_placement(state)], run_check=False, shape=whole.shape, stride=_strides(whole)
        )
        if leaf.op.kind == "parameter":
            return nn.Parameter(held, requires_grad=whole.requires_grad)
        return held

    def to_device(self, x: Tensor) -> Tensor:
        """A constant, on this rank's device."""
        return x.to(self.device)

    def compile(self, program: Program) -> GraphModule:
        """The program with mesh axes bound to process groups."""
        bound, env = Graph(), {}
        for node in program.graph.nodes:
            copy = bound.node_copy(node, lambda n: env[n])
            if is_ours(node.target):
                copy.args = (*copy.args[:-1], self._groups[str(node.args[-1])])
            env[node] = copy
        return graph_module(bound)

    def run(self, program: Program, tensors: Sequence[Tensor], module: GraphModule) -> list[Tensor]:
        """This rank's program, on local tensors."""
        local = [self._local(x) if isinstance(x, DTensor) else x for x in tensors]
        return list(module(*local))

    def _local(self, x: DTensor) -> Tensor:
        """The local tensor of a DTensor, as a leaf whose gradients are handed to the DTensor.

        `DTensor.to_local` is itself differentiable, at a price: about 85 µs a parameter and step.
        """
        inner = local_tensor(x)
        known = self._locals.get(id(x))
        if known is not None and known[0] is inner and known[1].requires_grad == x.requires_grad:
            return known[1]
        leaf = inner.detach().requires_grad_(x.requires_grad)
        if x.requires_grad:
            leaf.register_post_accumulate_grad_hook(_Handover(x))
        self._locals[id(x)] = inner, leaf
        return leaf

    def whole(self, x: Tensor) -> Tensor:
        """A held tensor, gathered on every rank."""
        return x.full_tensor() if isinstance(x, DTensor) else x

    def fit(self, given: Tensor, held: Tensor) -> Tensor:
        """A loaded tensor, sharded as `held` is."""
        if not isinstance(held, DTensor):
            return given.full_tensor() if isinstance(given, DTensor) else given
        if isinstance(given, DTensor):
            if given.placements == held.placements:
                return given
            given = given.full_tensor()
        return distribute_tensor(given.to(self.device), held.device_mesh, held.placements)


class _Handover:
    """Hands a gradient that arrived at a local leaf to its DTensor, adding to what is there."""

    def __init__(self, parameter: DTensor) -> None:
        self._parameter = parameter

    def __call__(self, leaf: Tensor) -> None:
        parameter, gradient = self._parameter, leaf.grad
        leaf.grad = None
        if gradient is None:
            return
        if parameter.grad is None:
            parameter.grad = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        else:
            local_tensor(parameter.grad).add_(gradient)  # type: ignore[arg-type]


def _placement(state: placement.Placement) -> Any:
    if not isinstance(state, placement.Shard):
        return Replicate()
    return Shard(state.dim) if state.blocks == 1 else strided_shard(state.dim, state.blocks)


def _strides(whole: Tensor) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(whole.shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    module = getattr(torch, kind)
    return torch.device(kind, module.current_device())


def _device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    kind = device.type
    if kind == "meta":
        kind = "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"
    try:
        names = tuple(axis.name for axis in mesh.axes)
        return init_device_mesh(kind, mesh.sizes, mesh_dim_names=names)
    except RuntimeError as error:
        raise MeshError(f"torch cannot make the mesh {mesh}: {error}") from error
