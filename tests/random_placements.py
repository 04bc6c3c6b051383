"""A strategy for every operator at random, such that all fit together."""

from __future__ import annotations

import random
from collections.abc import Iterator

from autoshard.placement import Placement, convertible
from autoshard.planner import Decided
from autoshard.strategies import Strategies


def choose(found: Strategies, seed: int) -> Decided | None:
    """A strategy for each class at random, such that all fit together; None where luck fails."""
    rng = random.Random(seed)
    whole = rng.choice((0.02, 0.1, 0.3))
    edges = list(_edges(found))
    for _ in range(10):
        left = [set(range(len(options))) for options in found.choices]
        _consistent(left, edges)
        order = list(range(len(left)))
        if rng.random() < 0.5:
            rng.shuffle(order)
        for index in order:
            some = sorted(left[index])
            if len(some) > 1 and rng.random() > whole:
                some = [i for i in some if i > 0]
            left[index] = {rng.choice(some)} if some else set()
            _consistent(left, edges)
        if all(left):
            return Decided(found, tuple(min(some) for some in left))
    return None


Edge = tuple[int, int, frozenset[tuple[int, int]]]


def _edges(found: Strategies) -> Iterator[Edge]:
    """(producer, consumer, pairs of strategies that fit), for each tensor that not all pairs fit."""
    for group in found.folded.groups:
        made = [s.results[group.result] for s in found.choices[group.producer]]
        for node, position in group.uses:
            wanted = [s.operands[position] for s in found.choices[node]]
            fixed = (group.producer, group.result) in found.fixed
            locked = (node, position) in found.locked
            pairs = frozenset(
                (i, j)
                for i, have in enumerate(made)
                for j, want in enumerate(wanted)
                if _fits(have[0], want[0], fixed=fixed, locked=locked)
            )
            if len(pairs) < len(made) * len(wanted):
                yield group.producer, node, pairs


def _fits(have: Placement, want: Placement, *, fixed: bool, locked: bool) -> bool:
    """Whether a tensor can become what is wanted: the planner's own conditions, said again."""
    if have == want:
        return True
    if locked or (fixed and (str(have), str(want)) != ("I", "R")):
        return False
    return convertible((have,), (want,))


def _consistent(left: list[set[int]], edges: list[Edge]) -> None:
    """Drop strategies for which a neighbour has none left that fits, until nothing changes."""
    changed = True
    while changed:
        changed = False
        for producer, consumer, pairs in edges:
            pair = [(i, j) for i, j in pairs if i in left[producer] and j in left[consumer]]
            for node, kept in ((producer, {i for i, _ in pair}), (consumer, {j for _, j in pair})):
                if left[node] - kept:
                    left[node] &= kept
                    changed = True
