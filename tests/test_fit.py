"""Robust fits: exact on exact data, close where some of it is wrong, errors where there is none."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.fit import checked, linear, scale
from autoshard.errors import CalibrationError

SIZES = [2.0**i for i in range(8, 26, 2)]


def line(a: float, b: float) -> tuple[list[tuple[float, float]], list[float]]:
    return [(1.0, size) for size in SIZES], [a + b * size for size in SIZES]


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-6))
def test_exact_data_gives_its_line(a: float, b: float) -> None:
    rows, times = line(a, b)
    assert linear(rows, times) == pytest.approx((a, b), rel=1e-6)


@given(st.integers(0, 10_000))
def test_outliers_do_not_move_the_line(seed: int) -> None:
    """Two of nine times are several times too long, as if another process had run."""
    rows, times = line(50e-6, 1e-9)
    draw = random.Random(seed)
    noisy = [time * draw.uniform(0.97, 1.03) for time in times]
    for index in draw.sample(range(2, len(times) - 1), 2):
        noisy[index] *= draw.uniform(3, 20)
    a, b = linear(rows, noisy)
    assert a == pytest.approx(50e-6, rel=0.1)
    assert b == pytest.approx(1e-9, rel=0.1)


def test_no_coefficient_is_below_zero() -> None:
    """A line through these would start below zero: a launch that takes no time, and then a rate."""
    rows, times = line(0.0, 1e-9)
    bent = [time if i else time * 0.5 for i, time in enumerate(times)]
    a, b = linear(rows, bent)
    assert a >= 0
    assert b == pytest.approx(1e-9, rel=0.05)


def test_small_times_count_as_much_as_large_ones() -> None:
    """A latency of microseconds is not lost beside transfers of seconds."""
    sizes = [1.0, 10.0, 100.0, 1e9, 1e10]
    a, _ = linear([(1.0, s) for s in sizes], [5e-6 + 1e-10 * s for s in sizes])
    assert a == pytest.approx(5e-6, rel=1e-3)


def test_three_coefficients() -> None:
    rows = [(1.0, float(steps), float(size)) for steps in (1, 2, 6) for size in (1e3, 1e5, 1e7)]
    times = [3e-5 + 1e-5 * steps + 2e-9 * size for _, steps, size in rows]
    assert linear(rows, times) == pytest.approx((3e-5, 1e-5, 2e-9), rel=1e-6)


def test_columns_that_are_one_share_what_they_explain() -> None:
    found = linear([(1.0, 2.0)] * 4, [6e-6] * 4)
    assert found[0] + 2 * found[1] == pytest.approx(6e-6)


def test_a_scale_inside_a_roofline() -> None:
    flops, floor = [1e6, 1e8, 1e9, 1e10], 1e-4
    times = [max(f / 3e10, floor) for f in flops]
    times[3] *= 7  # disturbed
    found = scale(lambda rate: [max(f / rate, floor) for f in flops], times, 1e6, 1e15)
    assert found == pytest.approx(3e10, rel=1e-3)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, None])
def test_what_is_no_measurement_is_an_error_and_never_zero(bad: float) -> None:
    with pytest.raises(CalibrationError, match="which is no measurement"):
        checked(bad, "all_reduce of 4 KiB")
    with pytest.raises(CalibrationError):
        linear([(1.0,), (2.0,)], [1.0, bad])
    with pytest.raises(CalibrationError):
        scale(lambda x: [x], [bad], 1.0, 2.0)


def test_too_few_measurements_are_an_error() -> None:
    with pytest.raises(CalibrationError, match="1 measurements are too few for 2 numbers"):
        linear([(1.0, 2.0)], [1.0])
    with pytest.raises(CalibrationError):
        linear([], [])
