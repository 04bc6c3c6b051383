"""Cutting a dimension into slices, and joining them again, with and without blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def take(x: Tensor, dim: int, blocks: int, rank: int, n: int) -> Tensor:
    """Rank `rank`'s slice of `x`, of n; a view where blocks is 1."""
    if blocks == 1:
        size = x.shape[dim] // n
        return x.narrow(dim, rank * size, size)
    return x.unflatten(dim, (blocks, n, -1)).select(dim + 1, rank).flatten(dim, dim + 1)


def join(slices: Sequence[Tensor], dim: int, blocks: int) -> Tensor:
    """The whole of which `slices` are the ranks' parts, in order."""
    if blocks == 1:
        return torch.cat(list(slices), dim)
    cut = [s.unflatten(dim, (blocks, -1)) for s in slices]
    return torch.stack(cut, dim + 1).flatten(dim, dim + 2)


def pad(x: Tensor, dim: int, blocks: int, rank: int, n: int) -> Tensor:
    """The whole with `x` in rank `rank`'s place and zeros elsewhere."""
    zero = torch.zeros_like(x)
    return join([x if r == rank else zero for r in range(n)], dim, blocks)
