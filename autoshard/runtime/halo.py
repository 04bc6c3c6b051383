"""Operators that slide over space which is split: the ranks exchange the edges of their slices, the halo.

A rank's slice of the result reads a range of the operand, that starts before its own slice and ends after
it. Every rank gives a strip of either end of its slice, all strips are gathered, and each rank puts together
the range that it reads; backward the strips' gradients are summed where they come from. What lies outside of
the operand is padding. The ranks' slices are those of `torch.chunk`, of the operand and of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from autoshard.runtime.communicator import Communicator
from autoshard.runtime.conversions import shard_to_replicate
from autoshard.runtime.slicing import chunk, grown

Tensors = Sequence[Tensor]
Range = tuple[int, int]


def halo_convolution(
    comm: Communicator,
    xs: Tensors,
    weights: Tensors,
    bias: Sequence[Tensor | None],
    stride: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    axis: int,
    length: int,
    made: int,
) -> list[Tensor]:
    """A convolution with dimension `axis` of space split: from `length` on all ranks to `made`.

    Args:
        comm, xs, weights, bias: as everywhere.
        stride, before, after, dilation, groups: of the convolution; padding at either end.
        axis: counted among the dimensions of space.
        length, made: of the whole operand and of the whole result.
    """
    dim = xs[0].dim() - len(stride) + axis
    reach = (weights[0].shape[2 + axis] - 1) * dilation[axis]
    ranges = _windows(comm, made, stride[axis], before[axis], reach)
    rest = [0 if i == axis else p for i, p in enumerate(before)]
    if rest != [0 if i == axis else p for i, p in enumerate(after)]:
        pads = [
            p
            for i in reversed(range(len(rest)))
            for p in ((0, 0) if i == axis else (before[i], after[i]))
        ]
        xs, rest = [F.pad(x, pads) for x in xs], [0] * len(rest)
    convolve: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[len(stride) - 1]
    found = [
        convolve(x, w, b, list(stride), rest, list(dilation), groups)
        for x, w, b in zip(_read(comm, xs, dim, length, ranges), weights, bias, strict=True)
    ]
    return _own(comm, found, dim, made)


def halo_transposed(
    comm: Communicator,
    xs: Tensors,
    weights: Tensors,
    bias: Sequence[Tensor | None],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    axis: int,
    length: int,
    made: int,
) -> list[Tensor]:
    """A transposed convolution; arguments as `halo_convolution` takes them.

    Operand i reaches the results from `i · stride - padding` on, as far as the kernel does.
    """
    dim = xs[0].dim() - len(stride) + axis
    reach = (weights[0].shape[2 + axis] - 1) * dilation[axis]
    step, skip = stride[axis], padding[axis]
    rest = [0 if i == axis else p for i, p in enumerate(padding)]
    extra = [0 if i == axis else p for i, p in enumerate(output_padding)]
    convolve: Callable[..., Tensor] = (
        F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d
    )[len(stride) - 1]  # fmt: skip
    cuts = [chunk(made, rank, comm.size) for rank in range(comm.size)]
    ranges = []
    for first, count in cuts:
        stop = (first + max(count, 1) - 1 + skip) // step + 1
        ranges.append((min(-(-(first + skip - reach) // step), stop - 1), stop))
    found = []
    given = zip(_read(comm, xs, dim, length, ranges), weights, bias, comm.ranks, strict=True)
    for x, w, b, rank in given:
        y = convolve(x, w, None, list(stride), rest, extra, groups, list(dilation))
        start = ranges[rank][0] * step - skip
        y = _padded(y, dim, start, cuts[rank], 0.0)
        found.append(y if b is None else y + b.reshape(-1, *[1] * len(stride)))
    return found


def halo_pool(
    comm: Communicator,
    xs: Tensors,
    kind: str,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    counted: bool,
    divisor: int | None,
    axis: int,
    length: int,
    made: int,
) -> list[Tensor]:
    """Pooling of `kind` "max" or "avg"; `counted` and `divisor` are the latter's, the rest as above."""
    dim, count = xs[0].dim() - len(kernel) + axis, len(kernel)
    ranges = _windows(comm, made, stride[axis], padding[axis], (kernel[axis] - 1) * dilation[axis])
    rest = [0 if i == axis else p for i, p in enumerate(padding)]
    most = kind == "max"
    read = _read(comm, xs, dim, length, ranges, -float("inf") if most else 0.0)
    given = (list(kernel), list(stride), rest)
    if most:
        pool: Callable[..., Tensor] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[count - 1]
        found = [pool(x, *given, list(dilation), ceil_mode) for x in read]
    else:
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[count - 1]
        last = () if count == 1 else (divisor,)
        found = [pool(x, *given, ceil_mode, counted, *last) for x in read]
    return _own(comm, found, dim, made)


def recut(
    comm: Communicator,
    xs: Tensors,
    rows: int,
    parts: int,
    anew: int,
    shape: Sequence[int],
    dim: int,
) -> list[Tensor]:
    """A view to `shape`, of whose dimension `dim` each rank has whole parts, other ones than it had.

    Args:
        comm, xs: as everywhere.
        rows: the product of the dimensions before the one that is split.
        parts, anew: how many parts the rest is cut in, before and afterwards.
        shape: of the whole result.
        dim: of the result, with `anew` parts.
    """
    length = math.prod(shape) // rows
    own = [chunk(anew, rank, comm.size) for rank in range(comm.size)]
    each = length // anew
    ranges = [(start * each, (start + count) * each) for start, count in own]
    flat = [x.reshape(rows, x.numel() // rows) for x in xs]
    read = _read(comm, flat, 1, length, ranges, each=length // parts)
    return [
        x.reshape([own[rank][1] if i == dim else n for i, n in enumerate(shape)])
        for x, rank in zip(read, comm.ranks, strict=True)
    ]


# --- ranges -------------------------------------------------------------------------------------


def _windows(comm: Communicator, made: int, stride: int, padding: int, reach: int) -> list[Range]:
    """What each rank's slice of a result reads: windows that start `stride` apart and end `reach` on."""
    found = []
    for rank in range(comm.size):
        first, count = chunk(made, rank, comm.size)
        last = first + max(count, 1) - 1
        found.append((first * stride - padding, last * stride - padding + reach + 1))
    return found


def _own(comm: Communicator, ys: Tensors, dim: int, made: int) -> list[Tensor]:
    """Results whose ranks make as much as they are to have, but for one that is to have nothing."""
    counts = [chunk(made, rank, comm.size)[1] for rank in comm.ranks]
    return [y if c else y.narrow(dim, 0, 0) for y, c in zip(ys, counts, strict=True)]


def _read(
    comm: Communicator,
    xs: Tensors,
    dim: int,
    length: int,
    ranges: Sequence[Range],
    padding: float = 0.0,
    each: int = 1,
) -> list[Tensor]:
    """Each rank's range of a dimension of `length` that is split, in whole parts of `each`.

    What lies outside of the dimension is `padding`.
    """
    n = comm.size
    cuts = [
        (start * each, count * each)
        for start, count in (chunk(length // each, r, n) for r in range(n))
    ]
    ends = [start + count for start, count in cuts]
    needs = [
        (max(start - max(first, 0), 0), max(min(stop, length) - end, 0))
        for (start, _), end, (first, stop) in zip(cuts, ends, ranges, strict=True)
    ]
    # No strip is longer than a slice: what reaches beyond a neighbour takes the next one's strip too.
    tail, head = (min(max(need[side] for need in needs), cuts[0][1]) for side in (0, 1))
    strips = _strips(comm, xs, dim, tail, head) if tail or head else list(xs)
    found = []
    for x, every, rank in zip(xs, strips, comm.ranks, strict=True):
        before, after = needs[rank]
        left, right = [], []
        for other in reversed(range(rank)):
            own, count = min(tail, cuts[other][1]), min(before, cuts[other][1])
            left.append(every.narrow(dim, other * (tail + head) + own - count, count))
            before -= count
        for other in range(rank + 1, n):
            count = min(after, cuts[other][1])
            right.append(every.narrow(dim, other * (tail + head) + tail, count))
            after -= count
        pieces = [p for p in (*reversed(left), x, *right) if p.shape[dim]]
        joined = torch.cat(pieces, dim) if len(pieces) > 1 else (pieces or [x])[0]
        first, stop = ranges[rank]
        start = cuts[rank][0] - needs[rank][0]
        found.append(_padded(joined, dim, start, (first, stop - first), padding))
    return found


def _strips(comm: Communicator, xs: Tensors, dim: int, tail: int, head: int) -> list[Tensor]:
    """The last `tail` and the first `head` rows of every rank's slice, in order of the ranks."""
    edges = []
    for x in xs:
        size = x.shape[dim]
        last, first = min(tail, size), min(head, size)
        ends = [x.narrow(dim, size - last, last), x.narrow(dim, 0, first)]
        edges.append(
            torch.cat([grown(e, dim, w) for e, w in zip(ends, (tail, head), strict=True)], dim)
        )
    return shard_to_replicate(comm, edges, dim, 1, comm.size * (tail + head))


def _padded(x: Tensor, dim: int, start: int, wanted: Range, padding: float) -> Tensor:
    """`x`, that begins at `start` of `dim`, cut and padded to begin at the first number and have the second."""
    first, count = wanted
    pads = (start - first, first + count - start - x.shape[dim])
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + list(pads), value=padding) if any(pads) else x


ALL: dict[str, Callable[..., list[Tensor]]] = {
    f.__name__: f for f in (halo_convolution, halo_transposed, halo_pool, recut)
}

_SPLIT = "int axis, int length, int made"
SCHEMAS = {
    "recut": "Tensor x, int rows, int parts, int anew, int[] shape, int dim",
    "halo_convolution": (
        "Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] before, int[] after, int[] dilation, "
        f"int groups, {_SPLIT}"
    ),
    "halo_transposed": (
        "Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] output_padding, "
        f"int[] dilation, int groups, {_SPLIT}"
    ),
    "halo_pool": (
        "Tensor x, str kind, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode, "
        f"bool counted, int? divisor, {_SPLIT}"
    ),
}
