"""The ten conversions of the placement algebra, each with its backward.

Every function takes a communicator and one tensor for each rank it carries, and gives as many. What
each does forward and backward is the table in `autoshard.placement`, line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.communicator import Communicator
from autoshard.runtime.slicing import pad, take

Tensors = Sequence[Tensor]
Action = Callable[[Tensors], Sequence[Tensor]]


class _Conversion(torch.autograd.Function):
    """Runs one action forward and another backward, on all the ranks carried at once."""

    @staticmethod
    def forward(ctx: Any, forward: Action, backward: Action, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.action = backward
        return tuple(forward(xs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.action(gradients))


def _convert(xs: Tensors, forward: Action, backward: Action) -> list[Tensor]:
    return list(_Conversion.apply(forward, backward, *xs))


def _same(xs: Tensors) -> list[Tensor]:
    return [x.view_as(x) for x in xs]


def invariant_to_replicate(comm: Communicator, xs: Tensors) -> list[Tensor]:
    """Forward nothing; backward, each rank's share of the gradient is summed. Megatron's f."""
    return _convert(xs, _same, comm.all_reduce)


def replicate_to_invariant(comm: Communicator, xs: Tensors) -> list[Tensor]:
    """Forward nothing; backward, the one gradient is divided into equal shares."""
    return _convert(xs, _same, lambda gs: [g / comm.size for g in gs])


def invariant_to_shard(comm: Communicator, xs: Tensors, dim: int, blocks: int) -> list[Tensor]:
    """Forward each rank takes its slice; backward the slices' gradients are gathered."""
    return _convert(xs, _slice(comm, dim, blocks), lambda gs: comm.all_gather(gs, dim, blocks))


def replicate_to_shard(comm: Communicator, xs: Tensors, dim: int, blocks: int) -> list[Tensor]:
    """Forward each rank takes its slice; backward it is padded with zeros: a share."""
    return _convert(
        xs,
        _slice(comm, dim, blocks),
        lambda gs: [
            pad(g, dim, blocks, r, comm.size) for g, r in zip(gs, comm.ranks, strict=True)
        ],
    )


def shard_to_replicate(comm: Communicator, xs: Tensors, dim: int, blocks: int) -> list[Tensor]:
    """Forward the slices are gathered; backward the shares are summed, each rank keeping its slice."""
    return _convert(
        xs,
        lambda vs: comm.all_gather(vs, dim, blocks),
        lambda gs: comm.reduce_scatter(gs, dim, blocks),
    )


def shard_to_invariant(comm: Communicator, xs: Tensors, dim: int, blocks: int) -> list[Tensor]:
    """Forward the slices are gathered; backward each rank takes its slice."""
    return _convert(xs, lambda vs: comm.all_gather(vs, dim, blocks), _slice(comm, dim, blocks))


def shard_to_shard(
    comm: Communicator, xs: Tensors, dim: int, blocks: int, to_dim: int, to_blocks: int
) -> list[Tensor]:
    """Forward and backward an all-to-all; where one dimension is cut in two ways, gather and slice."""
    have, want = (dim, blocks), (to_dim, to_blocks)
    return _convert(xs, _exchange(comm, have, want), _exchange(comm, want, have))


def partial_to_replicate(comm: Communicator, xs: Tensors) -> list[Tensor]:
    """Forward the shares are summed; backward so are the shares of the gradient."""
    return _convert(xs, comm.all_reduce, comm.all_reduce)


def partial_to_invariant(comm: Communicator, xs: Tensors) -> list[Tensor]:
    """Forward the shares are summed; backward nothing. Megatron's g."""
    return _convert(xs, comm.all_reduce, _same)


def partial_to_shard(comm: Communicator, xs: Tensors, dim: int, blocks: int) -> list[Tensor]:
    """Forward the shares are summed, each rank keeping its slice; backward the slices are gathered."""
    return _convert(
        xs,
        lambda vs: comm.reduce_scatter(vs, dim, blocks),
        lambda gs: comm.all_gather(gs, dim, blocks),
    )


def _slice(comm: Communicator, dim: int, blocks: int) -> Action:
    """Each rank its slice, laid out anew: nothing may write through it to the whole."""
    return lambda xs: [
        take(x, dim, blocks, r, comm.size).clone(memory_format=torch.contiguous_format)
        for x, r in zip(xs, comm.ranks, strict=True)
    ]


def _exchange(comm: Communicator, have: tuple[int, int], want: tuple[int, int]) -> Action:
    if have[0] != want[0]:
        return lambda xs: comm.all_to_all(xs, have, want)
    return lambda xs: _slice(comm, *want)(comm.all_gather(xs, *have))


ALL: dict[str, Callable[..., list[Tensor]]] = {
    f.__name__: f
    for f in (
        invariant_to_replicate,
        replicate_to_invariant,
        invariant_to_shard,
        replicate_to_shard,
        shard_to_replicate,
        shard_to_invariant,
        shard_to_shard,
        partial_to_replicate,
        partial_to_invariant,
        partial_to_shard,
    )
}
