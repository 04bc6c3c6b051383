"""Reductions of a dimension that is split: each rank reduces its slice, and statistics travel.

As conversions are, each is written over a communicator and one tensor for each rank carried. A
statistic that every rank uses on its own slice is Replicate, for its gradient is a share; one that is
the result is Invariant. Sizes of the whole are arguments, for slices may be of different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoshard.runtime.communicator import Communicator
from autoshard.runtime.conversions import (
    partial_to_invariant,
    partial_to_replicate,
    shard_to_replicate,
)
from autoshard.runtime.slicing import chunk

Tensors = Sequence[Tensor]
_HALF = (torch.float16, torch.bfloat16)


def wide(x: Tensor) -> Tensor:
    """Half precision in float32, in which torch keeps its statistics too."""
    return x.float() if x.dtype in _HALF else x


# --- extremes and the like ----------------------------------------------------------------------


class _Reduced(torch.autograd.Function):
    """A value found without autograd; its gradient reaches an operand by given weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.like = x.shape
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (weights,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient.expand(ctx.like) * weights, None, None


def _peaks(comm: Communicator, xs: Tensors, dims: list[int]) -> list[Tensor]:
    """The greatest elements over all ranks, with `dims` kept; an empty slice has none."""
    with torch.no_grad():
        return comm.all_reduce([greatest(x.detach(), dims) for x in xs], "max")


def greatest(x: Tensor, dims: list[int]) -> Tensor:
    """The greatest elements, with `dims` kept; where there are none, the least number there is."""
    if any(x.shape[d] == 0 for d in dims):
        shape = [1 if i in dims else n for i, n in enumerate(x.shape)]
        return x.new_full(
            shape, -float("inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
        )
    return x.amax(dims, keepdim=True)


def _without(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return x if keepdim else x.squeeze(dims)


def split_extreme(
    comm: Communicator, xs: Tensors, dims: list[int], keepdim: bool, least: bool
) -> list[Tensor]:
    """`amax`, or `amin`; the gradient is shared by all elements that are equal to it."""
    signed = [-x.detach() if least else x.detach() for x in xs]
    peaks = _peaks(comm, signed, dims)
    if not xs[0].is_floating_point():
        return [_without(-m if least else m, dims, keepdim) for m in peaks]
    found = [(z == m).to(z.dtype) for z, m in zip(signed, peaks, strict=True)]
    counts = comm.all_reduce([f.sum(dims, keepdim=True) for f in found])
    return [
        _without(_Reduced.apply(x, -m if least else m, f / c), dims, keepdim)
        for x, m, f, c in zip(xs, peaks, found, counts, strict=True)
    ]


def shared_argmax(
    comm: Communicator, xs: Tensors, dim: int, keepdim: bool, length: int, least: bool
) -> list[Tensor]:
    """`argmax`, or `argmin`, of a dimension of `length`: the first place, as torch gives."""
    values, places = [], []
    for x, rank in zip(xs, comm.ranks, strict=True):
        x = x.detach()
        if not x.shape[dim]:  # the last ranks alone have nothing: what they say is never the first
            shape = [1 if i == dim else n for i, n in enumerate(x.shape)]
            values.append(x.new_full(shape, _last(x.dtype, least)))
            places.append(x.new_zeros(shape, dtype=torch.int64))
            continue
        own = x.argmin(dim, keepdim=True) if least else x.argmax(dim, keepdim=True)
        values.append(x.gather(dim, own))
        places.append(own + chunk(length, rank, comm.size)[0])
    cut = (dim, 1, comm.size)
    gathered = zip(comm.all_gather(values, cut), comm.all_gather(places, cut), strict=True)
    found = []
    for every, where in gathered:
        first = every.argmin(dim, keepdim=True) if least else every.argmax(dim, keepdim=True)
        found.append(_without(where.gather(dim, first), [dim], keepdim))
    return found


def _last(dtype: torch.dtype, least: bool) -> float:
    """What is no extreme before anything else is."""
    if dtype.is_floating_point:
        return float("inf") if least else -float("inf")
    return torch.iinfo(dtype).max if least else torch.iinfo(dtype).min


def split_any(
    comm: Communicator, xs: Tensors, dims: list[int], keepdim: bool, every: bool
) -> list[Tensor]:
    """`any`, or `all`: that no element is false."""
    own = [(x == 0 if every else x != 0).any(dims, keepdim=keepdim) for x in xs]
    found = comm.all_reduce([x.to(torch.uint8) for x in own], "max")
    return [x == 0 if every else x != 0 for x in found]


def split_vector_norm(
    comm: Communicator, xs: Tensors, dims: list[int], keepdim: bool
) -> list[Tensor]:
    """The root of the sum of squares."""
    squares = [wide(x).abs().square().sum(dims, keepdim=keepdim) for x in xs]
    sums = partial_to_invariant(comm, squares)
    return [_root(s).to(x.real.dtype) for s, x in zip(sums, xs, strict=True)]


def _root(x: Tensor) -> Tensor:
    """The square root, whose gradient at zero is zero."""
    zero = x == 0
    return x.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def split_variance(
    comm: Communicator,
    xs: Tensors,
    dims: list[int],
    keepdim: bool,
    count: int,
    correction: float,
    root: bool,
) -> list[Tensor]:
    """The variance of `count` elements, or its root.

    The mean needs no gradient: the sum of what is left of it is zero.
    """
    inputs = [wide(x) for x in xs]
    with torch.no_grad():
        sums = comm.all_reduce([x.detach().sum(dims, keepdim=True) for x in inputs])
    squares = [
        (x - s / count).square().sum(dims, keepdim=keepdim)
        for x, s in zip(inputs, sums, strict=True)
    ]
    found = [s / max(count - correction, 0) for s in partial_to_invariant(comm, squares)]
    return [(_root(v) if root else v).to(x.dtype) for v, x in zip(found, xs, strict=True)]


# --- softmax ------------------------------------------------------------------------------------


def split_softmax(
    comm: Communicator, xs: Tensors, dim: int, log: bool, dtype: torch.dtype | None
) -> list[Tensor]:
    """`softmax`, or `log_softmax`, each rank's own slice of it."""
    inputs = [wide(x if dtype is None else x.to(dtype)) for x in xs]
    peaks = _peaks(comm, inputs, [dim])
    shifted = [x - m for x, m in zip(inputs, peaks, strict=True)]
    powers = [z.exp() for z in shifted]
    totals = partial_to_replicate(comm, [e.sum(dim, keepdim=True) for e in powers])
    made = [z - t.log() if log else e / t for z, e, t in zip(shifted, powers, totals, strict=True)]
    return [y.to(dtype or x.dtype) for y, x in zip(made, xs, strict=True)]


def split_logsumexp(
    comm: Communicator, xs: Tensors, dims: list[int], keepdim: bool
) -> list[Tensor]:
    """The logarithm of the sum of exponentials."""
    inputs = [wide(x) for x in xs]
    peaks = [m.masked_fill(m.isinf(), 0.0) for m in _peaks(comm, inputs, dims)]
    powers = [(x - m).exp().sum(dims, keepdim=True) for x, m in zip(inputs, peaks, strict=True)]
    totals = partial_to_invariant(comm, powers)
    found = [_without(t.log() + m, dims, keepdim) for t, m in zip(totals, peaks, strict=True)]
    return [y.to(x.dtype) for y, x in zip(found, xs, strict=True)]


# --- along a dimension --------------------------------------------------------------------------


def split_cumsum(comm: Communicator, xs: Tensors, dim: int) -> list[Tensor]:
    """Each rank's running sums, and the totals of the ranks before it."""
    totals = [x.sum(dim, keepdim=True) for x in xs]
    if totals[0].is_floating_point() or totals[0].is_complex():
        gathered = shard_to_replicate(comm, totals, dim, 1, comm.size)
    else:
        gathered = comm.all_gather(totals, (dim, 1, comm.size))
    return [
        x.cumsum(dim) + every.narrow(dim, 0, rank).sum(dim, keepdim=True)
        for x, every, rank in zip(xs, gathered, comm.ranks, strict=True)
    ]


def split_lookup(
    comm: Communicator, xs: Tensors, places: Tensors, dim: int, whole: int
) -> list[Tensor]:
    """What lies at `places` of `dim`, which they replace; zeros for the places of other ranks: a share."""
    found = []
    for x, index, rank in zip(xs, places, comm.ranks, strict=True):
        x, own, elsewhere = _own(comm, x, index, dim, whole, rank)
        y = x.index_select(dim, own.flatten()).unflatten(dim, own.shape or (1,))
        y = y if own.dim() else y.squeeze(dim)
        after = x.dim() - dim - 1
        found.append(y.masked_fill(elsewhere.reshape(*own.shape, *[1] * after), 0))
    return found


def split_gather(
    comm: Communicator, xs: Tensors, places: Tensors, dim: int, whole: int
) -> list[Tensor]:
    """`gather` along a split dimension; zeros for the places of other ranks: a share."""
    found = []
    for x, index, rank in zip(xs, places, comm.ranks, strict=True):
        x, own, elsewhere = _own(comm, x, index, dim, whole, rank)
        found.append(x.gather(dim, own).masked_fill(elsewhere, 0))
    return found


def _own(
    comm: Communicator, x: Tensor, index: Tensor, dim: int, whole: int, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A slice with something in it, the places in it, and which places are of other ranks."""
    size = x.shape[dim]
    own = torch.where(index < 0, index + whole, index) - chunk(whole, rank, comm.size)[0]
    elsewhere = (own < 0) | (own >= size)
    if size == 0:
        x = F.pad(x.movedim(dim, -1), (0, 1)).movedim(-1, dim)
    return x, own.masked_fill(elsewhere, 0), elsewhere


ALL: dict[str, Callable[..., list[Tensor]]] = {
    f.__name__: f
    for f in (
        split_extreme,
        shared_argmax,
        split_any,
        split_vector_norm,
        split_variance,
        split_softmax,
        split_logsumexp,
        split_cumsum,
        split_lookup,
        split_gather,
    )
}

SCHEMAS = {
    "split_extreme": "Tensor x, int[] dims, bool keepdim, bool least",
    "shared_argmax": "Tensor x, int dim, bool keepdim, int length, bool least",
    "split_any": "Tensor x, int[] dims, bool keepdim, bool every",
    "split_vector_norm": "Tensor x, int[] dims, bool keepdim",
    "split_variance": "Tensor x, int[] dims, bool keepdim, int count, float correction, bool root",
    "split_softmax": "Tensor x, int dim, bool log, ScalarType? dtype",
    "split_logsumexp": "Tensor x, int[] dims, bool keepdim",
    "split_cumsum": "Tensor x, int dim",
    "split_lookup": "Tensor x, Tensor places, int dim, int whole",
    "split_gather": "Tensor x, Tensor places, int dim, int whole",
}
