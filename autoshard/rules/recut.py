"""Views whose dimensions no rank count divides: heads of a width, cut as whole heads.

14 heads of 64 on 4 ranks are 896 features, cut in slices of 224; as heads they are cut in 4, 4, 4 and 2. A
view between the two moves what lies between the cuts: each rank reads its heads from its own features and its
neighbours' edges.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.rules.rule import FIXED, Call, Dims, Inner, Names, Place, Special

_WHY = "whole parts of a dimension, as heads are, are cut elsewhere than their elements"


@dataclass(frozen=True)
class Recut:
    """What a `Rule` takes of the factors that are cut anew."""

    joint: tuple[tuple[str, tuple[Place, ...]], ...] = ()
    lengths: tuple[tuple[str, tuple[int, ...]], ...] = ()
    specials: tuple[Special, ...] = ()
    instead: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Of the factors: none may be cut in blocks."""
        return frozenset(name for name, _ in self.joint)


def recuts(call: Call, names: Names, x: Dims, y: Dims) -> Recut:
    """The factors that are the outermost of a dimension before and after, and inside of one of them.

    Each may be cut as whole dimensions are, unevenly, where it cannot be cut evenly.
    """
    found = Recut()
    ends = {dims[0]: dim for dim, dims in enumerate(y) if dims}
    for dim, factors in enumerate(x):
        factor = factors[0] if factors else FIXED
        at = ends.get(factor)
        if at is None or factor.startswith(FIXED) or len(factors) == len(y[at]) == 1:
            continue
        name, count = f"{factor}~", names.sizes[factor]
        have, want = call.shape(0)[dim], call.out[at]
        names.sizes[name] = have
        before = math.prod(call.shape(0)[:dim])
        each = math.prod(call.shape(0)[dim:]) // count
        cut = functools.partial(_exchanged, call, before, count * each, (have, want))
        found = Recut(
            (*found.joint, (name, ((False, 0, dim, 1), (True, 0, at, 1)))),
            (*found.lengths, (name, (want,))),
            (*found.specials, Special(name, "recut", (), cut)),
            (*found.instead, (name, factor)),
        )
    return found


def _exchanged(
    call: Call, before: int, length: int, parts: tuple[int, int], n: int
) -> tuple[Inner, ...]:
    """The exchange of edges between slices of `length` elements, cut in whole parts of two kinds."""
    have, want = (_cuts(length, count, n) for count in parts)
    tail = max(start - first for (start, _), (first, _) in zip(have, want, strict=True))
    head = max(stop - end for (_, end), (_, stop) in zip(have, want, strict=True))
    width = min(max(tail, 0), have[0][1]) + min(max(head, 0), have[0][1])
    if not width:
        return ()
    meta = call.operands[0]
    found = (
        Inner(
            "all_gather",
            "forward",
            (before, width),
            meta.dtype,
            f"{_WHY}; this gathers what lies between",
            per_rank=True,
        ),
    )
    if meta.grad:
        back = f"{_WHY}; this sums the gradients of what lies between"
        found += (
            Inner("reduce_scatter", "backward", (before, width), meta.dtype, back, per_rank=True),
        )
    return found


def _cuts(length: int, parts: int, n: int) -> Sequence[tuple[int, int]]:
    """Where the ranks' slices of whole parts start and end, in elements."""
    step, each = -(-parts // n), length // parts
    return [(min(r * step, parts) * each, min((r + 1) * step, parts) * each) for r in range(n)]
