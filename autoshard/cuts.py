"""How each dimension of the graph may be cut: in which blocks, and whose dimension it is.

A cut is a (class, factor, blocks). Cuts that a rule joins are one dimension of the model, followed
through the whole graph: a weight's (features, heads, vocabulary), or data's (batch, sequence, space).
"""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.fold import Folded
from autoshard.rules.rule import FIXED, Rule

MAX_BLOCKS = 8
"""Blocks beyond this are not tried: fused weights have two, three or a few parts."""

Item = tuple[int, int, int, int]
"""A way to cut a tensor: (class, result, dimension, blocks)."""
Cut = tuple[int, str, int]
"""A way to cut a factor: (class, factor, blocks)."""
Rules = tuple[Rule | None, ...]
Results = frozenset[tuple[int, int]]

# --- blocks -------------------------------------------------------------------------------------


def _places(folded: Folded, index: int, rule: Rule, factor: str) -> list[tuple[int, int, int, int]]:
    """Where a factor is, as (class, result, dimension, outer), operands by who makes them."""
    found = []
    for is_result, which, dim, outer in rule.places[factor]:
        if is_result:
            found.append((index, which, dim, outer))
        else:
            found += [(*made, dim, outer) for made in folded.sources.get((index, which), ())]
    return found


def splits(rule: Rule, factor: str, blocks: int, n: int) -> bool:
    """Whether a factor may be cut in `blocks` blocks of n slices each, equal ones if there are blocks."""
    if factor.startswith(FIXED):
        return False
    if blocks > 1 and factor in rule.contiguous:
        return False
    other = dict(rule.instead).get(factor)
    if other is not None and splits(rule, other, 1, n):
        return False
    size = rule.size[factor]
    others = next((given for name, given in rule.lengths if name == factor), ())
    if not all(reaches(length, n) for length in others):
        return False
    if size % (blocks * n) == 0:
        return size > blocks
    return blocks == 1 and factor in rule.uneven and reaches(size, n)


def reaches(size: int, n: int) -> bool:
    """Whether each of n ranks has something of a dimension that is cut as `torch.chunk` cuts it."""
    return (n - 1) * -(-size // n) < size


def possible_cuts(
    folded: Folded, rules: Rules, n: int, max_blocks: int = MAX_BLOCKS
) -> dict[tuple[int, str], frozenset[int]]:
    """For each (class, factor), the numbers of blocks worth trying.

    A view that splits a dimension into (3, heads) wants it in 3 blocks. What one operator wants of a
    tensor, its neighbours must be able to give, so wants spread through the rules to a fixpoint.
    """
    wants: dict[tuple[int, int, int], set[int]] = {}
    places = {
        (i, f): _places(folded, i, rule, f)
        for i, rule in enumerate(rules)
        if rule
        for f, _ in rule.sizes
        if splits(rule, f, 1, n)
    }
    found: dict[tuple[int, str], set[int]] = {key: {1} for key in places}
    changed = True
    while changed:
        changed = False
        for (index, factor), where in places.items():
            rule, known = rules[index], found[index, factor]
            assert rule is not None
            for made, result, dim, outer in where:
                for blocks in wants.get((made, result, dim), ()):
                    inner, rest = divmod(blocks, outer)
                    if not rest and inner not in known and splits(rule, factor, inner, n):
                        known.add(inner)
            for made, result, dim, outer in where:
                wanted = wants.setdefault((made, result, dim), set())
                new = {outer * k for k in known if outer * k <= max_blocks} - wanted
                if new:
                    wanted |= new
                    changed = True
    return {key: frozenset(blocks) for key, blocks in found.items()}


# --- whose dimensions they are -----------------------------------------------------------------

_PRODUCTS = ("contraction", "gather", "attention")


class Dimensions:
    """The cuts of a graph, joined to dimensions of the model."""

    def __init__(
        self, folded: Folded, rules: Rules, cuts: dict[tuple[int, str], frozenset[int]]
    ) -> None:
        self._folded, self._rules = folded, rules
        self._parent: dict[Item, Item] = {}
        self._items: dict[Cut, list[Item]] = {}
        for (index, factor), blocks in sorted(cuts.items()):
            rule = rules[index]
            assert rule is not None
            for k in sorted(blocks):
                places = _places(folded, index, rule, factor)
                if factor in rule.apart:  # whose dimension it is, the result says
                    places = [place for place in places if place[0] == index]
                where = [(made, result, dim, outer * k) for made, result, dim, outer in places]
                self._items[index, factor, k] = where
                for other in where[1:]:
                    self._parent[self._root(other)] = self._root(where[0])

    def _root(self, item: Item) -> Item:
        parent = self._parent
        parent.setdefault(item, item)
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def _through(self, marked: Iterable[Item]) -> frozenset[Cut]:
        """The cuts of the dimensions that these items are of."""
        ours = {self._root(item) for item in marked}
        return frozenset(
            cut for cut, where in self._items.items() if where and self._root(where[0]) in ours
        )

    def of_weights(self, weights: Results) -> frozenset[Cut]:
        """The cuts of weights' dimensions: those that a product multiplies by, or a lookup takes from.

        Adding a table of positions makes no weight's dimension of a sequence.
        """
        return self._through(
            (made, result, dim, outer * k)
            for index, factor, k in self._items
            for rule in [self._rules[index]]
            if rule is not None and rule.family in _PRODUCTS
            for is_result, which, dim, outer in rule.places[factor]
            if not is_result
            for made, result in self._folded.sources.get((index, which), ())
            if (made, result) in weights
        )

    def of_batch(self) -> frozenset[Cut]:
        """The cuts of the inputs' first dimension."""
        return self._through(self._inputs(0))

    def of_inputs(
        self, dim: int, apart: frozenset[Cut] = frozenset()
    ) -> tuple[frozenset[tuple[int, int, int]], frozenset[Cut]]:
        """What holds dimension `dim` of the inputs, whole or as a factor.

        For dim 1, a sequence, inputs of two or three dimensions count: those of images have channels.

        Args:
            dim: which.
            apart: cuts whose dimensions are not the inputs' own: those of weights.

        Returns:
            (class, result, dimension) triples, and the cuts of rules.
        """
        others = {self._root(where[0]) for cut in apart if (where := self._items[cut])}
        marked = [item for item in self._inputs(dim) if self._root(item) not in others]
        ours = {self._root(item) for item in marked}
        items = frozenset(item[:3] for item in list(self._parent) if self._root(item) in ours)
        return items, self._through(marked)

    def join(self, one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
        """Take two (class, result, dimension) for one, where no rule says so."""
        self._parent[self._root((*one, 1))] = self._root((*other, 1))

    def _inputs(self, dim: int) -> list[Item]:
        return [
            (index, 0, dim, 1)
            for index, cls in enumerate(self._folded.classes)
            if cls.op.kind == "input" and cls.op.results and cls.op.results[0]
            if dim == 0 or len(cls.op.results[0].shape) in (2, 3)
        ]


def statistics(rules: Rules, cuts: Iterable[Cut]) -> frozenset[Cut]:
    """The cuts that make an operator without a weight reduce its statistics over the ranks."""
    return frozenset(
        (index, factor, k)
        for index, factor, k in cuts
        for rule in [rules[index]]
        if rule is not None and rule.family in ("reduction", "norm")
        if not any(place[0] for place in rule.places[factor])
        or any(special.factor == factor for special in rule.specials)
    )
