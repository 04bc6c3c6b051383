"""The ten conversions of the placement algebra, each with its backward.

Every function takes a communicator and one tensor for each rank it carries, and gives as many; one that
cuts or joins takes the dimension, its blocks, and its length in the whole. What
each does forward and backward is the table in `autoshard.placement`, line by line.

A gradient is in a state too: that of an Invariant tensor is Invariant, of a Replicate one Partial, of
a Partial one Replicate, of a Shard the same Shard. So the backward of X → Y is itself a conversion,
from the state of Y's gradient to that of X's, and gradients of gradients are right by the same table.
Two moves are met in backward alone: I → P divides, S → P pads with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.communicator import Communicator
from autoshard.runtime.slicing import pad, take

Tensors = Sequence[Tensor]
Move = Callable[..., Sequence[Tensor]]

ALL: dict[str, Callable[..., list[Tensor]]] = {}
"""The conversions by name, filled below; those that only backward meets are in `_MOVES` alone."""

_MOVES: dict[str, tuple[Move, str]] = {}
"""What each does forward, and the name of its backward."""


class _Convert(torch.autograd.Function):
    """One move forward and its backward, on all the ranks carried at once."""

    @staticmethod
    def forward(
        ctx: Any, name: str, comm: Communicator, cuts: tuple[int, ...], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.name, ctx.comm, ctx.cuts = name, comm, cuts
        return tuple(_MOVES[name][0](comm, xs, *cuts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        back = (*ctx.cuts[3:], *ctx.cuts[:3])  # from S to S′ and back: the cuts trade places
        return (None, None, None, *_convert(_MOVES[ctx.name][1], ctx.comm, gradients, back))


def _convert(name: str, comm: Communicator, xs: Tensors, cuts: tuple[int, ...]) -> list[Tensor]:
    if not torch.is_grad_enabled():
        return list(_MOVES[name][0](comm, xs, *cuts))
    return list(_Convert.apply(name, comm, cuts, *xs))


def _conversion(*, backward: str) -> Callable[[Move], Callable[..., list[Tensor]]]:
    """Make a conversion of the function that says what it does forward."""

    def make(forward: Move) -> Callable[..., list[Tensor]]:
        name = forward.__name__
        _MOVES[name] = forward, backward

        def convert(comm: Communicator, xs: Tensors, *cuts: int) -> list[Tensor]:
            return _convert(name, comm, xs, cuts)

        convert.__name__, convert.__doc__ = name, forward.__doc__
        ALL[name] = convert
        return convert

    return make


def _same(comm: Communicator, xs: Tensors) -> list[Tensor]:
    return [x.view_as(x) for x in xs]


def _slice(comm: Communicator, xs: Tensors, dim: int, blocks: int, length: int) -> list[Tensor]:
    """Each rank its slice, laid out anew: nothing may write through it to the whole."""
    return [
        take(x, dim, blocks, r, comm.size).clone(memory_format=torch.contiguous_format)
        for x, r in zip(xs, comm.ranks, strict=True)
    ]


@_conversion(backward="partial_to_invariant")
def invariant_to_replicate(comm: Communicator, xs: Tensors) -> list[Tensor]:
    """Forward nothing; backward, each rank's share of the gradient is summed. Megatron's f."""
    return _same(comm, xs)


@_conversion(backward="invariant_to_partial")
def replicate_to_invariant(comm: Communicator, xs: Tensors) -> list[Tensor]:
    """Forward nothing; backward, the one gradient is divided into equal shares."""
    return _same(comm, xs)


@_conversion(backward="shard_to_invariant")
def invariant_to_shard(
    comm: Communicator, xs: Tensors, dim: int, blocks: int, length: int
) -> list[Tensor]:
    """Forward each rank takes its slice; backward the slices' gradients are gathered."""
    return _slice(comm, xs, dim, blocks, length)


@_conversion(backward="shard_to_partial")
def replicate_to_shard(
    comm: Communicator, xs: Tensors, dim: int, blocks: int, length: int
) -> list[Tensor]:
    """Forward each rank takes its slice; backward it is padded with zeros: a share."""
    return _slice(comm, xs, dim, blocks, length)


@_conversion(backward="partial_to_shard")
def shard_to_replicate(
    comm: Communicator, xs: Tensors, dim: int, blocks: int, length: int
) -> list[Tensor]:
    """Forward the slices are gathered; backward the shares are summed, each rank keeping its slice."""
    return comm.all_gather(xs, (dim, blocks, length))


@_conversion(backward="invariant_to_shard")
def shard_to_invariant(
    comm: Communicator, xs: Tensors, dim: int, blocks: int, length: int
) -> list[Tensor]:
    """Forward the slices are gathered; backward each rank takes its slice."""
    return comm.all_gather(xs, (dim, blocks, length))


@_conversion(backward="shard_to_shard")
def shard_to_shard(
    comm: Communicator,
    xs: Tensors,
    dim: int,
    blocks: int,
    length: int,
    to_dim: int,
    to_blocks: int,
    to_length: int,
) -> list[Tensor]:
    """Forward and backward an all-to-all; where one dimension is cut in two ways, gather and slice."""
    if dim != to_dim:
        return comm.all_to_all(xs, (dim, blocks, length), (to_dim, to_blocks, to_length))
    return _slice(comm, comm.all_gather(xs, (dim, blocks, length)), to_dim, to_blocks, to_length)


@_conversion(backward="partial_to_replicate")
def partial_to_replicate(comm: Communicator, xs: Tensors) -> list[Tensor]:
    """Forward the shares are summed; backward so are the shares of the gradient."""
    return comm.all_reduce(xs)


@_conversion(backward="invariant_to_replicate")
def partial_to_invariant(comm: Communicator, xs: Tensors) -> list[Tensor]:
    """Forward the shares are summed; backward nothing. Megatron's g."""
    return comm.all_reduce(xs)


@_conversion(backward="shard_to_replicate")
def partial_to_shard(
    comm: Communicator, xs: Tensors, dim: int, blocks: int, length: int
) -> list[Tensor]:
    """Forward the shares are summed, each rank keeping its slice; backward the slices are gathered."""
    return comm.reduce_scatter(xs, (dim, blocks, length))


# --- met in backward alone ----------------------------------------------------------------------


def _divide(comm: Communicator, xs: Tensors) -> list[Tensor]:
    return [x / comm.size for x in xs]


def _pad(comm: Communicator, xs: Tensors, dim: int, blocks: int, length: int) -> list[Tensor]:
    return [pad(x, dim, blocks, length, r, comm.size) for x, r in zip(xs, comm.ranks, strict=True)]


_MOVES["invariant_to_partial"] = _divide, "replicate_to_invariant"
_MOVES["shard_to_partial"] = _pad, "replicate_to_shard"
