"""Cases of operators over space: kernels wider than a slice, strides that leave a remainder, padding of either end."""

from __future__ import annotations

import torch
from rules_harness import case, exactly, ints, normal, uniform

INF, NAN = float("inf"), float("nan")

SPACE = [
    case("conv1d", normal(2, 3, 20), normal(4, 3, 5), None, [1], [2]),
    case("conv1d", normal(2, 3, 20), normal(4, 3, 3), normal(4), [2], [1]),
    case("conv1d", normal(3, 21), normal(4, 3, 4), normal(4), [3], [0], [2]),
    case("conv1d", normal(2, 4, 12), normal(4, 2, 9), None, [1], [4], [1], 2),
    case("conv1d", normal(2, 3, 25), normal(4, 3, 1), None, [4]),
    case("conv1d.padding", normal(2, 3, 15), normal(4, 3, 4), None, [1], "same", [2]),
    case("conv1d.padding", normal(2, 3, 15), normal(4, 3, 4), normal(4), [1], "valid"),
    case("conv2d", normal(1, 3, 20, 10), normal(4, 3, 3, 5), normal(4), [2, 1], [1, 2], [1, 1]),
    case("conv2d", normal(1, 3, 24, 12), normal(5, 3, 4, 4), None, [4, 4]),
    case("conv2d.padding", normal(1, 3, 10, 12), normal(5, 3, 4, 2), None, [1, 1], "same"),
    case("conv3d", normal(1, 2, 10, 6, 5), normal(3, 2, 3, 3, 3), None, [1, 2, 1], [1, 1, 1]),
    case("conv_transpose1d", normal(2, 3, 11), normal(3, 4, 4), normal(4), [2], [1]),
    case("conv_transpose1d", normal(3, 10), normal(3, 4, 3), None, [2], [1], [1], 1, [2]),
    case("conv_transpose1d", normal(2, 3, 10), normal(3, 4, 1), normal(4), [3], [0], [2]),
    case(
        "conv_transpose2d.input", normal(1, 3, 10, 5), normal(3, 4, 2, 3), normal(4), [2, 1], [0, 1]
    ),
    case(
        "conv_transpose3d.input",
        normal(1, 2, 5, 4, 3),
        normal(2, 3, 3, 3, 3),
        None,
        [2, 1, 1],
        [1, 1, 0],
    ),
    case("max_pool1d", normal(2, 3, 21), [3], [2], [1]),
    case("max_pool1d", normal(3, 20), [3], [2], [1], [2]),
    case("max_pool2d", normal(1, 3, 11, 10), [3, 2], [2, 2], [1, 0], [1, 1], True),
    case("max_pool2d", normal(1, 2, 20, 10), 3, 1, 1),
    case("max_pool3d", normal(1, 2, 10, 6, 5), [3, 3, 3], [2, 2, 1], [1, 1, 1]),
    case("avg_pool1d", normal(2, 3, 21), [3], [2], [1]),
    case("avg_pool2d", normal(1, 3, 20, 10), [3, 2], [2, 2], [1, 0], False, True, 5),
    case("avg_pool2d", normal(1, 3, 10, 10), [3, 3], [1, 1], [0, 1], True, False),
    case("avg_pool3d", normal(1, 2, 10, 4, 6), [3, 2, 2], [1, 2, 2]),
    case("adaptive_avg_pool2d", normal(2, 3, 5, 4), [1, 2]),
    case("upsample_nearest1d.vec", normal(2, 3, 5), [20], None),
    case("upsample_nearest2d.vec", normal(1, 3, 10, 4), None, [2.0, 4.0]),
    case("upsample_nearest2d.vec", normal(1, 3, 10, 4), [30, 8], None),
]

EXCHANGED = [
    case(
        "transformers.grouped_mm_fallback",
        normal(23, 6),
        normal(5, 6, 4),
        exactly([0, 2, 17, 17, 20], torch.int32),
    ),
    case("index_select", normal(10, 3), 0, ints(10, 14)),
    case("index.Tensor", normal(14, 2, 3), [ints(14, 10, low=-14)]),
    case("index.Tensor", normal(5, 3), [exactly([4, 4, 0, 4, 0, 1, 4])]),
]
"""Rows that travel between ranks: all of an expert's on one of them, some experts without any."""

PLACES = [
    *[case(f"{name}softmax.int", normal(), -1, splits=False) for name in ("", "log_")],
    case("sort", normal(), -1, splits=False),
    case("argmax", normal(4, 10), 1),
    case("argmax", ints(3, 4, 12), 1, True),
    case("argmin", ints(2, 11, 3), 0),
    case("argmin", exactly([[2.0, NAN, 1.0, NAN], [INF, INF, INF, INF]]), 1),
    case("argmax", exactly([[-INF, -INF, -INF], [0.0, -0.0, 0.0]]), -1),
    case("histc", normal(4, 12, grad=False), 5, -1, 1),
    case("histc", normal(4, 12, grad=False), 5, splits=False),
    case(
        "linalg_solve_triangular", uniform(4, 5, 5, low=1.0, high=2.0), normal(4, 5, 6), upper=True
    ),
    case(
        "linalg_solve_triangular",
        uniform(2, 1, 3, 3, low=1.0, high=2.0),
        normal(4, 6, 3),
        upper=False,
        left=False,
        unitriangular=True,
    ),
]
"""Ties go to the first place, and what is no number is the extreme."""

RECUT = [
    case("view", normal(2, 3, 28), [2, 3, 7, 4]),
    case("view", normal(2, 3, 56), [2, 3, -1, 4]),
    case("view", normal(3, 5, 2), [15, 2]),
    case("reshape", normal(2, 3, 14, 4), [2, 3, 56]),
    case("reshape", normal(2, 9, 2), [6, 6]),
    case("reshape", normal(15, 4), [3, 5, 4]),
    case("reshape", normal(5, 14, 3), [5, 7, 6]),
    case("flatten.using_ints", normal(2, 9, 4), 1, 2),
    case("unflatten.int", normal(4, 20), -1, [5, -1]),
]
"""Views of whole parts, as heads are, that no number of ranks divides."""
