"""How the tensors of a graph grow with the batch and with the sequence that it was captured for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autoshard.cuts import Dimensions, possible_cuts
from autoshard.graph import TensorMeta
from autoshard.planner.survey import Survey
from autoshard.rules.rule import Rule

Powers = tuple[int, int]
"""Powers of the batch size and of the sequence length."""
Growth = Mapping[Powers, float]
"""A polynomial in the batch and the sequence, relative to those planned for: coefficients by powers."""
_NO_LIMIT = 2**40
_ALONG = ("reduction", "norm", "loss", "pointwise")
_NOTHING = 1e-6
"""A coefficient below this part of the whole is the rounding of sizes to whole numbers."""


@dataclass(frozen=True)
class Scaling:
    """Which dimensions and factors are the batch's and the sequence's.

    Attributes:
        dims: by (class, result, dimension); a flattened dimension may be of both.
        factors: by (class, factor of its rule).
    """

    dims: dict[tuple[int, int, int], Powers]
    factors: dict[tuple[int, str], Powers]

    def of(self, made: tuple[int, int], meta: TensorMeta | None) -> Powers:
        """The powers with which a tensor's size grows."""
        found = [self.dims.get((*made, d), (0, 0)) for d in range(len(meta.shape) if meta else 0)]
        return sum(p[0] for p in found), sum(p[1] for p in found)

    def scaled(self, made: tuple[int, int], meta: TensorMeta, by: Powers) -> TensorMeta:
        """A tensor's meta for a batch and a sequence `by` times as large."""
        powers = [self.dims.get((*made, dim), (0, 0)) for dim in range(len(meta.shape))]
        shape = [n * by[0] ** p[0] * by[1] ** p[1] for n, p in zip(meta.shape, powers, strict=True)]
        return replace(meta, shape=tuple(shape))

    def scaled_rule(self, index: int, rule: Rule, by: Powers) -> Rule:
        """A class's rule for a batch and a sequence `by` times as large."""
        powers = [self.factors.get((index, name), (0, 0)) for name, _ in rule.sizes]
        sizes = [
            (name, size * by[0] ** p[0] * by[1] ** p[1])
            for (name, size), p in zip(rule.sizes, powers, strict=True)
        ]
        return replace(rule, sizes=tuple(sizes))


def scaling(survey: Survey) -> Scaling:
    """Follow the inputs' first two dimensions through the graph.

    What is stored does not grow, nor does what a weight multiplies (the features of a table), nor a
    dimension of size 1: a batch of one is not followed.
    """
    folded, rules = survey.folded, survey.rules
    dimensions = Dimensions(folded, rules, possible_cuts(folded, rules, 1, _NO_LIMIT))
    for one, other in _kept_along(survey):
        dimensions.join(one, other)
    stored = {index for index, cls in enumerate(folded.classes) if cls.op.stored}
    dims: dict[tuple[int, int, int], list[int]] = {}
    factors: dict[tuple[int, str], list[int]] = {}
    weights = frozenset(
        (i, 0) for i, cls in enumerate(folded.classes) if cls.op.kind == "parameter"
    )
    features = dimensions.of_weights(weights)
    for which in (0, 1):
        items, cuts = dimensions.of_inputs(which, features)
        for item in items:
            if item[0] not in stored:
                dims.setdefault(item, [0, 0])[which] = 1
        for index, factor, _ in cuts:
            factors.setdefault((index, factor), [0, 0])[which] = 1
    return Scaling(
        {item: (p[0], p[1]) for item, p in dims.items()},
        {cut: (p[0], p[1]) for cut, p in factors.items()},
    )


def _kept_along(survey: Survey) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    """Dimensions that an operator may not split and keeps, as a softmax does, with where they come from."""
    found = []
    for index, rule in enumerate(survey.rules):
        if rule is None or rule.family not in _ALONG or not rule.operands:
            continue
        op, metas = survey.folded.classes[index].op, survey.folded.operand_metas(index)
        made = survey.folded.sources.get((index, 0), ())
        first = op.results[0] if op.results else None
        if first is None or not made or first.shape != metas[0].shape:
            continue
        found += [
            ((index, 0, dim), (*made[0], dim))
            for dim, factors in enumerate(rule.operands[0])
            if not factors and metas[0].shape[dim] > 1
        ]
    return found


def growth(value: Callable[[Powers], float], degrees: Powers, step: int) -> Growth:
    """The polynomial that a size is of the batch and the sequence.

    Args:
        value: the size, for a batch and a sequence some times as large.
        degrees: the greatest powers that can be.
        step: what every dimension that is split divides by: it is evaluated at multiples of that, where
            ranks hold equal slices, and made to give what was planned as planned.
    """
    at_rest = value((1, 1))
    if not at_rest:
        return {}
    if degrees == (0, 0):
        return {(0, 0): at_rest}
    grid = [
        _coefficients([value((step * (b + 1), step * (s + 1))) for s in range(degrees[1] + 1)])
        for b in range(degrees[0] + 1)
    ]
    found = {
        (b, s): coefficient / step ** (b + s)
        for s, column in enumerate(zip(*grid, strict=True))
        for b, coefficient in enumerate(_coefficients(list(column)))
    }
    whole = sum(found.values())
    kept = {powers: c for powers, c in found.items() if c > _NOTHING * whole}
    ratio = at_rest / sum(kept.values())
    return {powers: c * ratio for powers, c in kept.items()}


def _coefficients(values: list[float]) -> list[float]:
    """The polynomial through values at 1, 2 and 3, as far as there are so many, from the lowest power."""
    if len(values) == 1:
        return values
    first, second = values[0], values[1]
    if len(values) == 2:
        return [2 * first - second, second - first]
    half = (values[2] - 2 * second + first) / 2
    slope = second - first - 3 * half
    return [first - slope - half, slope, half]
