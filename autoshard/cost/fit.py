"""Fit a few numbers, none below zero, to measurements of which some are wrong.

Times span decades and are only ever disturbed upwards (another process ran), so that errors are relative
and what lies far off counts for little: Huber's loss by iteratively re-weighted least squares, from the
least absolute deviations. P. J. Huber, Robust Estimation of a Location Parameter, Annals of Mathematical
Statistics 35(1), 1964.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from autoshard.errors import CalibrationError

_HUBER = 1.345
"""In standard deviations: beyond it an error counts linearly; 95 % efficient where errors are normal."""
_ROUNDS = 60
_TINY = 1e-9

Row = Sequence[float]


def linear(rows: Sequence[Row], times_s: Sequence[float]) -> tuple[float, ...]:
    """Coefficients c ≥ 0 such that Σ c·row is each time, with relative errors kept small robustly.

    Args:
        rows: what each time is made of, a number a coefficient.
        times_s: measured, above 0.

    Raises:
        CalibrationError: there are fewer times than coefficients, or one is not above 0.
    """
    width = len(rows[0]) if rows else 1
    if len(rows) < width:
        raise CalibrationError(
            f"{len(rows)} measurements are too few for {width} numbers.", fix="Measure again."
        )
    for time_s in times_s:
        checked(time_s, "a measurement")
    scaled = [[value / time_s for value in row] for row, time_s in zip(rows, times_s, strict=True)]
    weights = [1.0] * len(rows)
    found = _least_squares(scaled, weights)
    for turn in range(_ROUNDS):
        errors = [abs(sum(map(float.__mul__, found, row)) - 1) for row in map(_floats, scaled)]
        limit = _TINY if turn < _ROUNDS // 2 else _HUBER * 1.4826 * statistics.median(errors)
        weights = [min(1.0, max(limit, _TINY) / max(error, _TINY)) for error in errors]
        before, found = found, _least_squares(scaled, weights)
        settled = turn > _ROUNDS // 2 and all(
            math.isclose(a, b, rel_tol=1e-10, abs_tol=1e-300)
            for a, b in zip(before, found, strict=True)
        )
        if settled:
            break
    return found


def scale(
    predict: Callable[[float], Sequence[float]],
    times_s: Sequence[float],
    low: float,
    high: float,
) -> float:
    """The number between `low` and `high` whose predictions have the least median-like error.

    Args:
        predict: the times, in the order of `times_s`, for such a number. Searched on a grid of
            logarithms and then between its neighbours, as rooflines have corners.
        times_s: measured.
        low, high: both above 0.
    """
    for time_s in times_s:
        checked(time_s, "a measurement")

    def loss(exponent: float) -> float:
        pairs = zip(predict(math.exp(exponent)), times_s, strict=True)
        return sum(abs(math.log(max(found, 1e-300) / time_s)) for found, time_s in pairs)

    a, b = math.log(low), math.log(high)
    for _ in range(6):
        grid = [a + (b - a) * i / 32 for i in range(33)]
        best = min(range(33), key=lambda i: loss(grid[i]))
        a, b = grid[max(best - 1, 0)], grid[min(best + 1, 32)]
    return math.exp((a + b) / 2)


def checked(value: float, what: str) -> float:
    """A measured time or rate.

    Raises:
        CalibrationError: it is missing, zero, negative or not finite.
    """
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CalibrationError(
            f"{what[:1].upper()}{what[1:]} gave {value!r}, which is no measurement.",
            fix="Run again on a machine that does nothing else; nothing was written.",
        )
    return float(value)


def _floats(row: Row) -> list[float]:
    return [float(value) for value in row]


def _least_squares(rows: Sequence[Row], weights: Sequence[float]) -> tuple[float, ...]:
    """Weighted least squares for Σ c·row = 1 with c ≥ 0: the best of every choice of columns.

    There are two or three columns, so that all choices are few.
    """
    width = len(rows[0])
    best, least = (0.0,) * width, math.inf
    for count in range(width, 0, -1):
        for kept in itertools.combinations(range(width), count):
            solved = _solve(rows, weights, kept)
            if solved is None or min(solved) < 0:
                continue
            found = [0.0] * width
            for index, value in zip(kept, solved, strict=True):
                found[index] = value
            loss = sum(
                w * (sum(c * v for c, v in zip(found, row, strict=True)) - 1) ** 2
                for w, row in zip(weights, rows, strict=True)
            )
            if loss < least * (1 - 1e-12):
                best, least = tuple(found), loss
    return best


def _solve(
    rows: Sequence[Row], weights: Sequence[float], kept: tuple[int, ...]
) -> list[float] | None:
    """The normal equations of some columns, by elimination; None where they are singular."""
    size = [max(abs(row[k]) for row in rows) or 1.0 for k in kept]
    columns = [[row[k] / s for row in rows] for k, s in zip(kept, size, strict=True)]
    matrix = [
        [
            *(sum(w * a * b for w, a, b in zip(weights, x, y, strict=True)) for y in columns),
            sum(w * a for w, a in zip(weights, x, strict=True)),
        ]
        for x in columns
    ]
    n = len(kept)
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(matrix[r][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-14:
            return None
        for r in range(n):
            if r != i:
                factor = matrix[r][i] / matrix[i][i]
                matrix[r] = [a - factor * b for a, b in zip(matrix[r], matrix[i], strict=True)]
    return [matrix[i][n] / matrix[i][i] / size[i] for i in range(n)]
