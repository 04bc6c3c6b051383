"""Rows that travel by what they are: from where they lie to where they are wanted, and back.

How many go from which rank to which depends on data, which every rank has whole: the ends of experts' rows,
or places to look up. So counts are known without talking, at the price of reading them on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.communicator import Communicator, Counts
from autoshard.runtime.slicing import chunk

Tensors = Sequence[Tensor]


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that they are for; backward their gradients return."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, counts: Counts, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.counts = comm, counts
        return tuple(comm.exchange(xs, counts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *exchange(ctx.comm, gradients, _returned(ctx.counts)))


def exchange(comm: Communicator, xs: Tensors, counts: Counts) -> list[Tensor]:
    """`Communicator.exchange`, differentiably."""
    if not torch.is_grad_enabled():
        return comm.exchange(xs, counts)
    return list(_Exchange.apply(comm, counts, *xs))


def _returned(counts: Counts) -> Counts:
    """The way back."""
    return [list(column) for column in zip(*counts, strict=True)]


def exchanged_products(
    comm: Communicator, xs: Tensors, weights: Tensors, ends: Tensors, length: int
) -> list[Tensor]:
    """Products of sorted rows, `length` in all, that are split evenly, with experts that are split too.

    A rank's experts' rows are a run, as are a rank's own: rows that are in both stay, the others go to
    their experts, and the products return. Where experts have about as many rows each, few of them move.
    """
    n, stops = comm.size, [int(stop) for stop in ends[0].tolist()]
    cuts = [chunk(len(stops), rank, n) for rank in range(n)]
    starts = [stops[first - 1] if 0 < first <= len(stops) else 0 for first, _ in cuts] + [length]
    own = [chunk(length, rank, n) for rank in range(n)]
    counts = [
        [max(min(first + count, starts[q + 1]) - max(first, starts[q]), 0) for q in range(n)]
        for first, count in own
    ]
    found = []
    for x, weight, every, rank in zip(
        exchange(comm, xs, counts), weights, ends, comm.ranks, strict=True
    ):
        first, experts = cuts[rank]
        rows = every[first : first + experts] - starts[rank]
        found.append(grouped_products(x, weight, rows))
    return exchange(comm, found, _returned(counts))


def grouped_products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows `[s, i]` in order of their experts, which end at `ends`, each times its expert's of `[e, i, o]`.

    Rows behind the last end are zeros. The operator of transformers, where it is there: one node of a program.
    """
    operator = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if operator is not None:
        return operator(x, weight, ends)
    stops = [0, *(int(end) for end in ends.tolist())]
    sizes = [stop - start for start, stop in itertools.pairwise(stops)]
    *rows, rest = x.split([*sizes, x.shape[0] - stops[-1]])
    found = [own @ w for own, w in zip(rows, weight.unbind(0), strict=True)]
    return torch.cat([*found, rest.new_zeros(rest.shape[0], weight.shape[2])])


def exchanged_lookup(comm: Communicator, xs: Tensors, places: Tensors, length: int) -> list[Tensor]:
    """Rows that are split, of `length` in all, for places that every rank has, and each rank its slice of.

    The ranks that have rows send them to those whose places ask for them, in the order of the places.
    """
    n, step = comm.size, -(-length // comm.size)
    index = torch.where(places[0] < 0, places[0] + length, places[0])
    wanted = [chunk(index.shape[0], rank, n) for rank in range(n)]
    owners = index // step
    pairs = torch.stack(
        [torch.bincount(owners.narrow(0, *cut), minlength=n) for cut in wanted], dim=1
    )
    counts = pairs.tolist()  # from rows' rank to places' rank
    sent = []
    for x, rank in zip(xs, comm.ranks, strict=True):
        rows = [
            part[owners.narrow(0, *cut) == rank]
            for cut in wanted
            for part in (index.narrow(0, *cut),)
        ]
        sent.append(x.index_select(0, torch.cat(rows).to(x.device) - rank * step))
    found = []
    for x, rank in zip(exchange(comm, sent, counts), comm.ranks, strict=True):
        order = owners.narrow(0, *wanted[rank]).argsort(stable=True)
        found.append(x.index_select(0, order.argsort().to(x.device)))
    return found


ALL: dict[str, Callable[..., list[Tensor]]] = {
    f.__name__: f for f in (exchanged_products, exchanged_lookup)
}

SCHEMAS = {
    "exchanged_products": "Tensor x, Tensor weight, Tensor ends, int length",
    "exchanged_lookup": "Tensor x, Tensor places, int length",
}
