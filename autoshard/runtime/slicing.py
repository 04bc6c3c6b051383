"""Cutting a dimension into slices, and joining them again, with and without blocks.

Without blocks a dimension is cut as `torch.chunk` cuts it, which is how DTensor does: slices of ⌈size/n⌉,
the last ones smaller, or empty, where n does not divide it. Blocks are always cut evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chunk(length: int, rank: int, n: int) -> tuple[int, int]:
    """Where rank `rank`'s slice of a dimension starts, and its size."""
    step = -(-length // n)
    start = min(rank * step, length)
    return start, min(step, length - start)


def take(x: Tensor, dim: int, blocks: int, rank: int, n: int) -> Tensor:
    """Rank `rank`'s slice of `x`, of n; a view where blocks is 1, contiguous where not.

    Blocks of one element would leave steps between them, with which torch's batch norm makes wrong gradients.
    """
    if blocks == 1:
        return x.narrow(dim, *chunk(x.shape[dim], rank, n))
    cut = x.unflatten(dim, (blocks, n, -1)).select(dim + 1, rank)
    return cut.flatten(dim, dim + 1).contiguous()


def join(slices: Sequence[Tensor], dim: int, blocks: int) -> Tensor:
    """The whole of which `slices` are the ranks' parts, in order."""
    if blocks == 1:
        return torch.cat(list(slices), dim)
    cut = [s.unflatten(dim, (blocks, -1)) for s in slices]
    return torch.stack(cut, dim + 1).flatten(dim, dim + 2)


def pad(x: Tensor, dim: int, blocks: int, length: int, rank: int, n: int) -> Tensor:
    """The whole, `length` long, with `x` in rank `rank`'s place and zeros elsewhere."""
    if blocks == 1:
        start, size = chunk(length, rank, n)
        return torch.cat([_zeros(x, dim, start), x, _zeros(x, dim, length - start - size)], dim)
    zero = torch.zeros_like(x)
    return join([x if r == rank else zero for r in range(n)], dim, blocks)


def grown(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` with zeros behind it in `dim`, up to `size`."""
    missing = size - x.shape[dim]
    return torch.cat([x, _zeros(x, dim, missing)], dim) if missing else x


def _zeros(like: Tensor, dim: int, size: int) -> Tensor:
    shape = list(like.shape)
    shape[dim] = size
    return like.new_zeros(shape)
