"""The four collectives over a process group, as functions of a rank's own tensor.

They are torch's functional collectives: they never write to their operands, they have kernels for
fake and meta tensors, and `torch.compile` knows them. They have no gradients here: those belong to the
conversions, which call these where no gradient is recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autoshard.compat import functional_collectives
from autoshard.runtime.slicing import join, take

_c10d = functional_collectives()


def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The "sum" or "max" of x over the ranks of a group."""
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), op, group))


def start_all_reduce(x: Tensor, group: str) -> Callable[[], Tensor]:
    """Begin to sum x over the ranks, where it lies; call the result to wait for the sum.

    Nothing else may hold `x`.
    """
    plain = type(x) is Tensor  # what traces the program has no operator that writes
    begin = _c10d.all_reduce_ if plain else _c10d.all_reduce
    begun = begin(x, "sum", group)
    return lambda: _c10d.wait_tensor(begun)


def all_gather(x: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
    """The whole whose slices of `dim` the ranks of a group hold."""
    stacked = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), size, group))
    if dim == 0 and blocks == 1:
        return stacked
    return join(stacked.chunk(size), dim, blocks).contiguous()


def reduce_scatter(x: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
    """This rank's slice of `dim` of the sum over the ranks of a group."""
    given = x if dim == 0 and blocks == 1 else torch.cat(_pieces(x, dim, blocks, size))
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(given.contiguous(), "sum", size, group))


def all_to_all(
    x: Tensor, have: tuple[int, int], want: tuple[int, int], size: int, group: str
) -> Tensor:
    """This rank's slice by `want`, a (dim, blocks), of the whole of which x is its slice by `have`."""
    pieces = _pieces(x, *want, size)
    rows = [piece.shape[0] for piece in pieces]
    received = _c10d.wait_tensor(_c10d.all_to_all_single(torch.cat(pieces), rows, rows, group))
    return join(received.chunk(size), *have).contiguous()


def _pieces(x: Tensor, dim: int, blocks: int, size: int) -> list[Tensor]:
    return [take(x, dim, blocks, r, size) for r in range(size)]
