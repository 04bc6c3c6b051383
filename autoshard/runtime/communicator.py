"""Who talks to whom: one interface, and two who keep it.

A communicator carries some of the ranks of one mesh axis in this process: `Distributed` its own one,
`Simulator` all of them. Each method takes and gives one tensor for each rank carried, so a conversion
is written once and runs on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from autoshard.compat import process_group
from autoshard.runtime import collectives
from autoshard.runtime.collectives import Cut
from autoshard.runtime.slicing import join, take

Tensors = Sequence[Tensor]
Counts = Sequence[Sequence[int]]


class Communicator(Protocol):
    """One mesh axis, seen from this process."""

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks carried here."""
        ...

    def all_reduce(self, xs: Tensors, op: str = "sum") -> list[Tensor]:
        """The "sum" or "max" over all ranks, on every rank."""
        ...

    def all_gather(self, xs: Tensors, cut: Cut) -> list[Tensor]:
        """The whole whose slices the ranks hold, on every rank."""
        ...

    def reduce_scatter(self, xs: Tensors, cut: Cut) -> list[Tensor]:
        """Each rank's slice of the sum over all ranks."""
        ...

    def all_to_all(self, xs: Tensors, have: Cut, want: Cut) -> list[Tensor]:
        """Slices by `have` turned to slices by `want`; the dims differ."""
        ...

    def exchange(self, xs: Tensors, counts: Counts) -> list[Tensor]:
        """`counts[r][q]` rows of rank r's tensor go to rank q, in order; each gets those for it, by rank."""
        ...


class Simulator:
    """All ranks of an axis in one process, in lockstep."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = tuple(range(size))

    def all_reduce(self, xs: Tensors, op: str = "sum") -> list[Tensor]:
        """See `Communicator`."""
        stacked = torch.stack(list(xs))
        total = stacked.sum(0) if op == "sum" else stacked.amax(0)
        return [total, *(total.clone() for _ in self.ranks[1:])]

    def all_gather(self, xs: Tensors, cut: Cut) -> list[Tensor]:
        """See `Communicator`."""
        whole = join(xs, *cut[:2])
        return [whole, *(whole.clone() for _ in self.ranks[1:])]

    def reduce_scatter(self, xs: Tensors, cut: Cut) -> list[Tensor]:
        """See `Communicator`."""
        total = torch.stack(list(xs)).sum(0)
        return [take(total, *cut[:2], r, self.size).contiguous() for r in self.ranks]

    def all_to_all(self, xs: Tensors, have: Cut, want: Cut) -> list[Tensor]:
        """See `Communicator`."""
        whole = join(xs, *have[:2])
        return [take(whole, *want[:2], r, self.size).contiguous() for r in self.ranks]

    def exchange(self, xs: Tensors, counts: Counts) -> list[Tensor]:
        """See `Communicator`."""
        parts = [x.split(list(sent)) for x, sent in zip(xs, counts, strict=True)]
        return [torch.cat([given[r] for given in parts]) for r in self.ranks]


class Distributed:
    """One rank of a `torch.distributed` process group, known by its name."""

    def __init__(self, group: str) -> None:
        self._group = group
        found = process_group(group)
        self.size: int = found.size()
        self.ranks = (found.rank(),)

    def all_reduce(self, xs: Tensors, op: str = "sum") -> list[Tensor]:
        """See `Communicator`."""
        return [collectives.all_reduce(x, op, self._group) for x in xs]

    def all_gather(self, xs: Tensors, cut: Cut) -> list[Tensor]:
        """See `Communicator`."""
        return [collectives.all_gather(x, cut, self.size, self._group) for x in xs]

    def reduce_scatter(self, xs: Tensors, cut: Cut) -> list[Tensor]:
        """See `Communicator`."""
        given = *self.ranks, self.size, self._group
        return [collectives.reduce_scatter(x, cut, *given) for x in xs]

    def all_to_all(self, xs: Tensors, have: Cut, want: Cut) -> list[Tensor]:
        """See `Communicator`."""
        given = *self.ranks, self.size, self._group
        return [collectives.all_to_all(x, have, want, *given) for x in xs]

    def exchange(self, xs: Tensors, counts: Counts) -> list[Tensor]:
        """See `Communicator`."""
        (rank,) = self.ranks
        received = [sent[rank] for sent in counts]
        return [collectives.exchange(x, counts[rank], received, self._group) for x in xs]
