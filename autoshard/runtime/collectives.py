"""The four collectives over a process group, as functions of a rank's own tensor.

They are torch's functional collectives: they never write to their operands, they have kernels for
fake and meta tensors, and `torch.compile` knows them. They have no gradients here: those belong to the
conversions, which call these where no gradient is recorded. A collective moves slices of one size: smaller
ones are grown with zeros before, and trimmed after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autoshard.compat import functional_collectives
from autoshard.runtime.slicing import chunk, grown, join, take

_c10d = functional_collectives()

Cut = tuple[int, int, int]
"""How a tensor is cut: the dimension, its blocks, and its length in the whole."""


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


def all_gather(x: Tensor, cut: Cut, size: int, group: str) -> Tensor:
    """The whole, `cut` in its slices that the `size` ranks of a group hold."""
    dim, blocks, length = cut
    x = grown(x, dim, -(-length // size))
    stacked = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), size, group))
    if dim == 0 and blocks == 1:
        return stacked if length % size == 0 else _trimmed(stacked.chunk(size), cut)
    return _trimmed(stacked.chunk(size), cut).contiguous()


def reduce_scatter(x: Tensor, cut: Cut, rank: int, size: int, group: str) -> Tensor:
    """This rank's slice of the sum over the `size` ranks of a group."""
    dim, blocks, length = cut
    plain = dim == 0 and blocks == 1 and length % size == 0
    given = x if plain else torch.cat(_pieces(x, cut, size))
    found = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(given.contiguous(), "sum", size, group))
    return found if length % size == 0 else found.narrow(dim, 0, chunk(length, rank, size)[1])


def all_to_all(x: Tensor, have: Cut, want: Cut, rank: int, size: int, group: str) -> Tensor:
    """This rank's slice by `want` of the whole of which x is its slice by `have`."""
    dim, _, length = want
    pieces = _pieces(grown(x, have[0], -(-have[2] // size)), want, size)
    rows = [piece.shape[0] for piece in pieces]
    received = _c10d.wait_tensor(_c10d.all_to_all_single(torch.cat(pieces), rows, rows, group))
    parts = list(received.chunk(size))
    if length % size:
        own = chunk(length, rank, size)[1]
        parts = [part.narrow(dim, 0, own) for part in parts]
    return _trimmed(parts, have).contiguous()


def exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """Rows of x, so many to each rank of a group in order, for the rows that each has for this one."""
    given = (list(received), list(sent), group)
    return _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), *given))


def _pieces(x: Tensor, cut: Cut, size: int) -> list[Tensor]:
    """Each rank's slice, all of one size."""
    dim, blocks, length = cut
    return [grown(take(x, dim, blocks, r, size), dim, -(-length // size)) for r in range(size)]


def _trimmed(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """The whole of slices that were brought to one size."""
    (dim, blocks, length), size = cut, len(parts)
    if length % size:
        parts = [p.narrow(dim, 0, chunk(length, r, size)[1]) for r, p in enumerate(parts)]
    return join(parts, dim, blocks)
