"""The placement algebra: what one mesh axis holds of a tensor, and what each conversion costs.

On one axis of n ranks a tensor is in one of four states. They differ in the values the ranks hold
and in what ordinary autograd, run by every rank on its own program, leaves behind as gradients:

    state              value on the ranks                gradient
    Invariant    I     the same everywhere               Invariant: already the same everywhere
    Replicate    R     the same everywhere               Partial: each rank's share, still to be summed
    Partial      P     shares, still to be summed        Replicate
    Shard(d, b)  S     slices of dimension d             Shard(d, b)

`CONVERSIONS` is the whole table of legal moves between them. Column and row parallelism, Megatron's f
and g, ZeRO, data and sequence parallelism are all paths in this table; none of them is a special case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.errors import PlanError


@dataclass(frozen=True, slots=True)
class Invariant:
    """The same on every rank, and so is its gradient."""

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same on every rank; each rank's gradient is a share still to be summed."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Shares still to be summed over the ranks; the gradient is the same on every rank."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True)
class Shard:
    """Slices of dimension `dim`, as `torch.chunk` cuts it: of ⌈size/n⌉, the last ones smaller or empty.

    With `blocks=b` the dimension is b equal blocks laid end to end and each block is split over the
    ranks: what a fused QKV weight `[3·H, D]` needs to be cut inside q, k and v alike (`blocks=3`).
    """

    dim: int
    blocks: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim},{self.blocks})"


Placement = Invariant | Replicate | Partial | Shard
Layout = tuple[Placement, ...]
"""One placement for each mesh axis, in the mesh's order."""

I = Invariant()  # noqa: E741 - the algebra's own letter
R = Replicate()
P = Partial()

_SHARD = re.compile(r"S\((\d+)(?:,(\d+))?\)")


def parse_placement(text: str) -> Placement:
    """The placement that `str` printed: "I", "R", "P", "S(0)" or "S(0,3)".

    Raises:
        PlanError: `text` is none of these.
    """
    if match := _SHARD.fullmatch(text):
        return Shard(int(match[1]), int(match[2] or 1))
    for placement in (I, R, P):
        if text == str(placement):
            return placement
    raise PlanError(f"'{text}' is not a placement.", fix="Use I, R, P, S(dim) or S(dim,blocks).")


def format_layout(layout: Layout) -> str:
    """A layout as text: placements joined by "×", one a mesh axis."""
    return "×".join(map(str, layout))


def parse_layout(text: str) -> Layout:
    """The layout that `format_layout` printed."""
    return tuple(map(parse_placement, text.split("×")))


@dataclass(frozen=True, slots=True)
class Conversion:
    """One legal move between two states: the name of its operator and what it communicates.

    `forward` and `backward` are a collective's name, or a local action: "" (nothing), "slice",
    "pad" or "divide".
    """

    name: str
    forward: str
    backward: str


CONVERSIONS: dict[tuple[type, type], Conversion] = {
    (Invariant, Replicate): Conversion("invariant_to_replicate", "", "all_reduce"),
    (Replicate, Invariant): Conversion("replicate_to_invariant", "", "divide"),
    (Invariant, Shard): Conversion("invariant_to_shard", "slice", "all_gather"),
    (Replicate, Shard): Conversion("replicate_to_shard", "slice", "pad"),
    (Shard, Replicate): Conversion("shard_to_replicate", "all_gather", "reduce_scatter"),
    (Shard, Invariant): Conversion("shard_to_invariant", "all_gather", "slice"),
    (Shard, Shard): Conversion("shard_to_shard", "all_to_all", "all_to_all"),
    (Partial, Replicate): Conversion("partial_to_replicate", "all_reduce", "all_reduce"),
    (Partial, Invariant): Conversion("partial_to_invariant", "all_reduce", ""),
    (Partial, Shard): Conversion("partial_to_shard", "reduce_scatter", "all_gather"),
}

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def conversion(have: Placement, want: Placement) -> Conversion | None:
    """The conversion from `have` to `want`: None where they are equal.

    Raises:
        KeyError: there is no such conversion (a value never becomes Partial by conversion).
    """
    if have == want:
        return None
    found = CONVERSIONS[type(have), type(want)]
    if isinstance(have, Shard) and isinstance(want, Shard) and have.dim == want.dim:
        # One dimension cut in two ways: no single all_to_all does it, so gather, then slice.
        return Conversion(found.name, "all_gather", "all_gather")
    return found


def convertible(have: Layout, want: Layout) -> bool:
    """Whether each axis of `have` can become that axis of `want`."""
    return all(h == w or (type(h), type(w)) in CONVERSIONS for h, w in zip(have, want, strict=True))


def local_shape(shape: tuple[int, ...], layout: Layout, sizes: Iterable[int]) -> tuple[int, ...]:
    """The shape that one rank holds of a tensor of `shape`, on axes of these sizes: the largest, if uneven."""
    local = list(shape)
    for placement, size in zip(layout, sizes, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = -(-local[placement.dim] // size)
    return tuple(local)
