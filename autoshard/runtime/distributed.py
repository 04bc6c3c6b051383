"""One rank of `torch.distributed`: parameters are `DTensor`s, the program runs on their local tensors."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx import Graph, GraphModule

from autoshard import placement
from autoshard.compat import local_tensor, sharded_like, spec_of, strided_shard
from autoshard.errors import MeshError, PlanError, VerifyError
from autoshard.mesh import Mesh
from autoshard.plan_types import Plan
from autoshard.rewrite import Leaf, Program
from autoshard.runtime.backend import graph_module
from autoshard.runtime.operators import is_ours
from autoshard.runtime.overlap import overlap
from autoshard.runtime.slicing import take


def usable(size: int, asked: Any = None) -> bool:
    """Whether to run on `torch.distributed`: a `DeviceMesh` is asked for, or the world has this size."""
    if not dist.is_available():
        return False
    if isinstance(asked, DeviceMesh):
        return True
    if not dist.is_initialized():
        return False
    if dist.get_world_size() != size:
        log.warning(
            "The world has %d ranks and the mesh %d: each rank simulates the whole mesh by itself. To run "
            "on some of the ranks, pass a DeviceMesh of them.", dist.get_world_size(), size,
        )  # fmt: skip
    return dist.get_world_size() == size


log = logging.getLogger("autoshard")


class DistributedBackend:
    """This process's rank."""

    def __init__(self, mesh: Mesh, asked: Any, device: torch.device) -> None:
        self._device_mesh = asked if isinstance(asked, DeviceMesh) else _device_mesh(mesh, device)
        if self._device_mesh.get_coordinate() is None:
            raise MeshError(
                f"Rank {dist.get_rank()} is not in the mesh {self._device_mesh}.",
                fix="Call autoshard on the ranks of the mesh alone.",
            )
        self.device = _device(self._device_mesh.device_type)
        self._groups = {
            axis.name: self._device_mesh.get_group(index) for index, axis in enumerate(mesh.axes)
        }

    # --- do the ranks agree? --------------------------------------------------------------------

    def agree(self, plan: Plan) -> None:
        """Compare the plans, so that ranks that decided differently stop here, not in a hang.

        Raises:
            PlanError: another rank has another plan; it says what differs.
        """
        mine = plan.to_json()
        for rank, other in self._different(mine):
            first, second = (plan, Plan.from_json(other))
            raise PlanError(
                f"The ranks have different plans. From rank {dist.get_rank()} (-) to rank {rank} (+):\n"
                f"{_clipped(first.diff(second))}",
                fix="Give every rank the same model, inputs and options, or plan once and load the plan.",
            )

    def compare(self, what: str, text: str) -> None:
        """Compare a decision that is no plan.

        Raises:
            PlanError: another rank decided differently.
        """
        for rank, other in self._different(text):
            raise PlanError(
                f"The ranks have different {what}: rank {dist.get_rank()} has {_clipped(text)}, rank "
                f"{rank} has {_clipped(other)}.",
                fix="Give every rank the same inputs, in the same mode.",
            )

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Compare what the ranks were given.

        Raises:
            VerifyError: it differs; it names the input.
        """
        mine = {name: _fingerprint(value) for name, value in inputs.items()}
        for rank, other in self._different(mine):
            names = [name for name in {**mine, **other} if mine.get(name) != other.get(name)]
            raise VerifyError(
                f"The ranks were given different inputs: {', '.join(names)}.",
                "; ".join(
                    f"{name}: {mine.get(name, 'missing')} on rank {dist.get_rank()}, "
                    f"{other.get(name, 'missing')} on rank {rank}"
                    for name in names
                ),
                "Every rank must pass the same batch: seed the data loader alike, and use no "
                "DistributedSampler over these ranks.",
            )

    def check_random_state(self) -> None:
        """Compare the states of torch's generators.

        Raises:
            VerifyError: they differ.
        """
        states = [torch.get_rng_state()]
        if self.device.type != "cpu":
            states.append(torch.get_device_module(self.device).get_rng_state(self.device))
        for rank, _ in self._different([_fingerprint(state) for state in states]):
            raise VerifyError(
                f"Ranks {dist.get_rank()} and {rank} have different random states, and the model drops at "
                "random: what is whole on both would differ.",
                fix="Call torch.manual_seed with one seed on every rank before the first step.",
            )

    def _different(self, mine: Any) -> list[tuple[int, Any]]:
        """What other ranks have, where it is not what this one has; the ranks meet here."""
        found = []
        for group in self._groups.values():
            everyone: list[Any] = [None] * group.size()
            dist.all_gather_object(everyone, mine, group)
            ranks = dist.get_process_group_ranks(group)
            found += [(r, other) for r, other in zip(ranks, everyone, strict=True) if other != mine]
        return found

    # --- tensors --------------------------------------------------------------------------------

    def hold(self, leaf: Leaf, whole: Tensor) -> nn.Parameter | Tensor:
        """This rank's part of an original parameter or buffer, as a `DTensor`.

        One on the meta device stays there: `to_empty` and `load_state_dict` give it values.
        """
        held = self._held(leaf, self._part(whole.detach(), _placement(leaf.layout[0])), whole.shape)
        if leaf.op.kind == "parameter":
            return nn.Parameter(held, requires_grad=whole.requires_grad)
        return held

    def _held(self, leaf: Leaf, local: Tensor, shape: torch.Size) -> Tensor:
        """This rank's part as it is kept: a `DTensor`, or as it is where it is a whole buffer."""
        state = leaf.layout[0]
        if leaf.op.kind == "buffer" and not isinstance(state, placement.Shard):
            return local
        where, strides = [_placement(state)], _strides(shape)
        return DTensor.from_local(
            local, self._device_mesh, where, run_check=False, shape=shape, stride=strides
        )

    def _part(self, whole: Tensor, where: Any) -> Tensor:
        """This rank's part of a whole tensor, in memory of its own.

        A strided shard is no `Shard` to DTensor; both have a `dim`.
        """
        if hasattr(where, "dim"):
            rank, size = self._device_mesh.get_local_rank(0), self._device_mesh.size(0)
            whole = take(whole, where.dim, getattr(where, "split_factor", 1), rank, size)
        device = whole.device if whole.is_meta else self.device
        return whole.to(device, copy=True, memory_format=torch.contiguous_format)

    def place(self, leaf: Leaf, held: Tensor) -> Tensor:
        """A held buffer as `leaf` takes it.

        Weights stay where they are in every program; a buffer may be whole in one and split in another.
        """
        wanted = _placement(leaf.layout[0])
        have = held.placements[0] if isinstance(held, DTensor) else Replicate()
        if have == wanted:
            return held
        return self._held(leaf, self._part(self.whole(held), wanted), held.shape)

    def to_device(self, x: Tensor) -> Tensor:
        """A constant, on this rank's device."""
        return x.to(self.device)

    def whole(self, x: Tensor) -> Tensor:
        """A held tensor, gathered on every rank."""
        return x.full_tensor() if isinstance(x, DTensor) else x

    def fit(self, given: Tensor, held: Tensor) -> Tensor:
        """A loaded tensor, sharded as `held` is; whole ones are cut on each rank, without talking."""
        if not isinstance(held, DTensor):
            return given.full_tensor() if isinstance(given, DTensor) else given
        if isinstance(given, DTensor):
            if given.placements == held.placements:
                return given
            given = given.full_tensor()
        return sharded_like(spec_of(held), self._part(given.detach(), held.placements[0]))

    # --- running --------------------------------------------------------------------------------

    def compile(self, program: Program) -> GraphModule:
        """The program with mesh axes bound to process groups."""
        bound, env = Graph(), {}
        for node in program.graph.nodes:
            copy = bound.node_copy(node, lambda n: env[n])
            if is_ours(node.target):
                copy.args = (*copy.args[:-1], self._groups[str(node.args[-1])].group_name)
            env[node] = copy
        overlap(bound)
        return graph_module(bound)

    def run(self, program: Program, tensors: Sequence[Tensor], module: GraphModule) -> list[Tensor]:
        """This rank's program, on local tensors."""
        return list(module(*[local_of(x) if isinstance(x, DTensor) else x for x in tensors]))


def local_of(x: DTensor) -> Tensor:
    """The local tensor of a DTensor, differentiably."""
    if torch.compiler.is_compiling():
        return x.to_local()  # which dynamo knows
    if x.requires_grad and torch.is_grad_enabled():
        return _ToLocal.apply(x)
    return local_tensor(x)


class _ToLocal(torch.autograd.Function):
    """A DTensor → its local tensor; the local gradient → a DTensor of the same placements.

    `DTensor.to_local` does the same and supports more, at four times the price a parameter and step.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.spec = spec_of(x)
        inner = local_tensor(x)
        return inner.view_as(inner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        if torch.is_grad_enabled():  # a gradient that is differentiated again
            return DTensor.from_local(
                gradient,
                ctx.spec.mesh,
                ctx.spec.placements,
                run_check=False,
                shape=ctx.spec.shape,
                stride=ctx.spec.stride,
            )
        return sharded_like(ctx.spec, gradient.contiguous())


def _fingerprint(value: Any) -> str:
    """What a value is, in a line: of a tensor its shape, dtype and a hash of its bytes."""
    if not isinstance(value, Tensor):
        return repr(value)
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    digest = hashlib.blake2b(data.numpy().tobytes(), digest_size=6).hexdigest()
    return f"{str(value.dtype)[6:]}{list(value.shape)} #{digest}"


def _clipped(text: str, lines: int = 20) -> str:
    """The first lines of a text."""
    kept = text.splitlines()[:lines]
    return "\n".join(line[:200] for line in kept) + (
        "\n  …" if len(text.splitlines()) > lines else ""
    )


def _placement(state: placement.Placement) -> Any:
    if not isinstance(state, placement.Shard):
        return Replicate()
    return Shard(state.dim) if state.blocks == 1 else strided_shard(state.dim, state.blocks)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    module = getattr(torch, kind)
    return torch.device(kind, module.current_device())


def _device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """A mesh over the world, of devices that its backend serves: the model's kind, or the accelerator's."""
    kind = device.type
    if kind not in ("cpu", "meta"):
        return _made(kind, mesh)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and "gloo" not in str(dist.get_backend()):
        return _made(accelerator.type, mesh)
    return _made("cpu", mesh)


def _made(kind: str, mesh: Mesh) -> DeviceMesh:
    try:
        names = tuple(axis.name for axis in mesh.axes)
        return init_device_mesh(kind, mesh.sizes, mesh_dim_names=names)
    except RuntimeError as error:
        raise MeshError(f"torch cannot make the mesh {mesh}: {error}") from error
