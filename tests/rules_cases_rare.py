"""Cases of operators that few models use, and of lookups and losses in all their forms.

As `rules_cases`, of whose table they are part.
"""

from __future__ import annotations

import torch
from rules_harness import Case, bools, case, complexes, exactly, ints, normal, uniform


def _each(names: str, *args: object, **options: object) -> list[Case]:
    return [case(name, *args, **options) for name in names.split()]


INF = float("inf")

ELEMENTWISE = [
    *_each("absolute arctan angle sgn deg2rad rad2deg i0 negative resolve_neg", normal(4, 12)),
    *_each("conj_physical sgn angle", complexes(4, 12)),
    *_each("isneginf isposinf signbit", exactly([1.0, -INF, INF, -0.5] * 3)),
    *_each("fmax fmin hypot arctan2 copysign.Tensor logaddexp2", normal(4, 12), normal(12)),
    *_each("clamp_min.Tensor clamp_max.Tensor", normal(4, 12), normal(12)),
    case("clip", normal(4, 12), -0.5, 0.5),
    case("float_power.Tensor_Scalar", uniform(4, 12), 2.5),
    case("special_xlog1py", uniform(4, 12), uniform(12)),
    case("heaviside", normal(4, 12, grad=False), normal(12, grad=False)),
    case("isclose", ints(3, 4, 12), ints(3, 12)),
    case("polar", uniform(4, 12), normal(4, 12)),
    case("polar", uniform(4, 12), normal(12)),
    *_each("greater.Scalar less.Scalar greater_equal.Scalar less_equal.Scalar", normal(4, 12), 0.1),
    case("not_equal.Scalar", ints(3, 4, 12), 1),
    *_each("greater.Tensor less.Tensor not_equal.Tensor", ints(3, 4, 12), ints(3, 12)),
    *_each("__xor__.Scalar bitwise_xor.Scalar", ints(9, 4, 12), 5),
    case("subtract.Tensor", normal(4, 12), normal(12)),
    case("multiply.Tensor", normal(4, 12), normal(12)),
    case("divide.Tensor", normal(4, 12), uniform(12)),
    case("lerp.Scalar", normal(4, 12), normal(4, 12), 0.3),
    case("mul.Tensor", normal(4, 12), ints(5, 12)),
    case("where.ScalarOther", bools(12), normal(4, 12), 0.0),
    case("copy", normal(4, 12, grad=False), normal(12, grad=False)),
    case("copy", normal(4, 12, grad=False), ints(9, 4, 1)),
    case("fill.Scalar", normal(4, 12), 2.0),
    case("fill.Tensor", normal(4, 12), normal()),
    case("zero", normal(4, 12)),
    case("to.other", normal(4, 12), normal(3, grad=False)),
    *_each("new_zeros new_ones", normal(4, 12), [6, 8]),
    case("new_full", normal(4, 12), [6, 8], 2.0),
    case("new_empty", normal(4, 12), [6, 8], values=False),
    case("prelu", normal(4, 12, 3), normal(12)),
    case("prelu", normal(4, 12), normal(1)),
    case("bucketize.Tensor", normal(4, 12), exactly([-1.0, -0.3, 0.2, 0.9])),
]

PRODUCTS = [
    case("einsum", "...ij,...jk->...ik", [normal(2, 4, 6, 8), normal(4, 8, 12)]),
    case("einsum", "bi,bj", [normal(4, 6), normal(4, 8)]),
    case("einsum", "ii,ij->j", [normal(4, 4), normal(4, 12)]),
    case("einsum", "bi,oi->bo", [normal(4, 12), normal(6, 12)]),
    case("einsum", "bhld,lrd->bhlr", [normal(2, 4, 6, 8), normal(6, 6, 8)]),
    case("cdist", normal(2, 6, 3), normal(2, 4, 3)),
    case("bilinear", normal(4, 6), normal(4, 8), normal(12, 6, 8)),
    case("grid_sampler", normal(4, 6, 5, 5), uniform(4, 2, 6, 2, low=-0.9), 0, 0, False),
    case("conv1d", normal(12, 7), normal(8, 12, 3)),
    case("conv2d", normal(12, 5, 4), normal(24, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], 6),
    case(
        "lstm.input",
        normal(4, 3, 6),
        [normal(1, 4, 5), normal(1, 4, 5)],
        [normal(20, 6), normal(20, 5), normal(20), normal(20)],
        *(True, 1, 0.0, True, False, True),
    ),
    case(
        "gru.input",
        normal(3, 4, 6),
        normal(1, 4, 5),
        [normal(15, 6), normal(15, 5), normal(15), normal(15)],
        *(True, 1, 0.0, True, False, False),
    ),
    *[
        case(
            name,
            normal(3, 4, 6),
            normal(2, 4, 5),
            [normal(5, 6), normal(5, 5), normal(5, 6), normal(5, 5)],
            *(False, 1, 0.0, False, True, False),
        )
        for name in ("rnn_tanh.input", "rnn_relu.input")
    ],
    case("lstm_cell", normal(4, 6), [normal(4, 5), normal(4, 5)], normal(20, 6), normal(20, 5)),
    case("gru_cell", normal(4, 6), normal(4, 5), normal(15, 6), normal(15, 5), normal(15)),
    case("rnn_tanh_cell", normal(4, 6), normal(4, 5), normal(5, 6), normal(5, 5)),
]

VIEWS = [
    case("view", normal(4, 6), [6, 4]),
    case("view", normal(4, 9), [6, 6]),
    case("view_as", normal(4, 12), normal(4, 3, 4, grad=False)),
    case("reshape_as", normal(24, 12), normal(4, 6, 12, grad=False)),
    case("ravel", normal(4, 12)),
    case("expand", normal(4, 1), [4, 5]),
    case("expand", normal(12), [5, 12]),
    case("expand_as", normal(4, 1), normal(4, 12, grad=False)),
    *_each("swapaxes swapdims", normal(4, 6, 12), 0, 2),
    *_each("moveaxis.int", normal(4, 6, 12), 0, -1),
    *_each("moveaxis.intlist movedim.intlist", normal(4, 6, 2, 12), [0, 3], [2, 0]),
    case("adjoint", complexes(4, 6, 12)),
    case("split_with_sizes", normal(4, 20), [12, 4, 4], -1),
    case("split_with_sizes", normal(4, 32), [8, 8, 16], -1),
    case("split.Tensor", normal(4, 20), 8, 1),
    case("chunk", normal(4, 20), 3, 1),
    *_each("unsafe_chunk", normal(4, 24), 2, -1),
    case("unsafe_split.Tensor", normal(4, 24), 12, 1),
    case("tensor_split.sections", normal(4, 24), 3, -1),
    case("slice.Tensor", normal(4, 24), 1, 0, 12),
    case("slice.Tensor", normal(4, 24), 1, 12, 9223372036854775807),
    case("slice.Tensor", normal(4, 24), -1, -8),
    case("slice.Tensor", normal(4, 24), 1, -16, -8),
    case("narrow", normal(4, 24), 1, 8, 8),
    case("cat", [normal(4, 12), normal(4, 4), normal(4, 8)], 1),
    case("concatenate", [normal(4, 12), normal(4, 12)], 1),
    case("slice_scatter", normal(4, 12), normal(4, 5), 1, 2, 7),
    case("select_scatter", normal(4, 6, 12), normal(4, 12), 1, 2),
    case("tile", normal(4, 12), [2, 3]),
    case("repeat", normal(4, 12), [2, 2, 3]),
    case("repeat_interleave.self_int", normal(4, 12), 3, 1),
    case("repeat_interleave.self_int", normal(4, 12), 2, 0),
    *_each("tril triu", normal(4, 6, 12), 1),
    case("diff", normal(4, 12)),
    case("diff", normal(4, 12), 1, 0),
    case("unfold", normal(4, 12), 1, 4, 2),
    case("diagonal", normal(4, 6, 12)),
    case("diagonal", normal(4, 6, 12), 0, -2, -1),
    case("diag_embed", normal(4, 12)),
    case("view_as_real", complexes(4, 12)),
    case("view_as_complex", normal(4, 12, 2)),
    case("pixel_shuffle", normal(4, 24, 3, 2), 2),
    case("pixel_unshuffle", normal(4, 6, 4, 6), 2),
    case("im2col", normal(4, 12, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]),
    case("meshgrid", [normal(4), normal(12)]),
    case("meshgrid.indexing", [normal(4), normal(12)], indexing="xy"),
    case("meshgrid.indexing", [normal(4), normal(6), normal(2)], indexing="ij"),
]

REDUCTIONS = [
    *_each(
        "amax amin",
        exactly([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, -1.0, 0.0]], torch.float64, grad=True),
        [1],
    ),
    *_each("amax amin", ints(5, 4, 12), [-1]),
    *_each("max min", normal(4, 12)),
    *_each("any.dims all.dims", bools(4, 6, 12), [0, 2]),
    *_each("any all", ints(2, 4, 12)),
    case("all", exactly([True] * 12)),
    case(
        "linalg_vector_norm",
        exactly([[0.0] * 4, [1.0, 2.0, 0.0, 2.0]], torch.float64, grad=True),
        2,
        [1],
    ),
    case("linalg_vector_norm", normal(4, 12), 3.0, [0, 1], splits=False),
    case("norm.Scalar", normal(4, 12), 2),
    case(
        "std.correction", exactly([[1.0] * 4, [1.0, 2.0, 0.0, 2.0]], torch.float64, grad=True), [1]
    ),
    case("std_mean.correction", normal(4, 12), [1]),
    case("nansum", normal(4, 12), [1]),
    case("count_nonzero", ints(2, 4, 12)),
    case("count_nonzero.dim_IntList", ints(2, 4, 12), [1]),
    case("median.dim", normal(4, 11), 1),
    case("aminmax", normal(4, 12), dim=1),
    case("kthvalue", normal(4, 12), 2, 1),
    case("logsumexp", exactly([[-INF] * 4, [1.0, 2.0, -INF, 2.0]]), [1]),
    case("logsumexp", normal(4, 6, 12), [0, 2], True),
    case("softmax.int", normal(4, 12), 1, torch.float32, bound=1e-6),
    case("softmax.int", normal(4, 12, dtype=torch.bfloat16), 1, bound=0.02),
    case(
        "softmax.int",
        exactly([[-INF, -INF, 1.0, 2.0], [1.0, 2.0, -INF, 2.0]], torch.float64, grad=True),
        -1,
    ),
    case("log_softmax.int", normal(12), 0),
    *_each("_safe_softmax special_softmax", normal(4, 12), 1),
    case("cumsum", ints(9, 4, 12), 1),
    case("cumsum", bools(4, 12), 1),
    case("cumsum", normal(12, 4), 0),
    *_each("cummax cummin logcumsumexp", normal(4, 12), 1),
    *_each("sort.stable argsort.stable", normal(4, 12), stable=True, dim=-1),
    *_each("fft_fft fft_ifft fft_rfft", normal(4, 12)),
    *_each("fft_fft2 fft_ifft2", normal(4, 6, 12)),
    *_each("fft_fftn fft_ifftn", complexes(4, 6, 12), None, [1, 2]),
    case("fft_irfft", complexes(4, 7)),
    case("cosine_similarity", normal(4, 6, 12), normal(4, 6, 12), -1),
    case("cosine_similarity", normal(4, 6, 12), normal(4, 1, 12), 2),
    case("glu", normal(24, 4), 0),
]

LOOKUPS = [
    case("index.Tensor", normal(12, 8), [exactly([-1, 0, 5, -12])]),
    case("index.Tensor", normal(12, 8), [exactly(3)]),
    case("index.Tensor", normal(4, 12, 6), [ints(4, 8), ints(12, 8)]),
    case("index.Tensor", normal(4, 6, 12), [ints(4, 8), None, ints(12, 8)]),
    case("index.Tensor", normal(4, 12, 6), [ints(4, 4, 1), ints(12, 6)]),
    case("index.Tensor", ints(9, 12, 4), [ints(12, 6)]),
    case("index_put", normal(12, 8), [ints(12, 4)], normal(4, 8)),
    case("index_put", normal(12, 8), [ints(12, 4)], normal(4, 8), True),
    case("index_put", normal(4, 12, 6), [None, exactly([1, 5, 7])], normal(6)),
    case("index_put", normal(4, 12), [bools(4, 12)], exactly(0.5, torch.float64)),
    case("index_put", normal(4, 12), [bools(4)], normal(1)),
    case("index_put", normal(4, 6, 12), [exactly([0, 2]), exactly([1, 1])], normal(2, 12)),
    case("scatter.src", normal(4, 12), 1, exactly([[0, 5], [1, 2], [3, 11], [4, 6]]), normal(4, 2)),
    case("scatter.src", normal(4, 12), 0, exactly([[1, 3, 2] * 4]), normal(1, 12)),
    case("scatter.value", normal(4, 12), 1, ints(12, 4, 3), 0.0),
    case("scatter.value", normal(4, 12), 1, ints(12, 4, 3), 1.0),
    case("scatter_add", normal(4, 12), 1, ints(12, 4, 6), normal(4, 6)),
    case("scatter_reduce.two", normal(4, 12), 1, ints(12, 4, 6), normal(4, 6), "sum"),
    case("index_add", normal(12, 8), 0, ints(12, 6), normal(6, 8)),
    case("index_copy", normal(12, 8), 0, exactly([1, 5, 7]), normal(3, 8)),
    case("index_fill.int_Scalar", normal(12, 8), 0, exactly([1, 5]), 2.0),
    case("index_fill.int_Tensor", normal(12, 8), 0, exactly([1, 5]), normal()),
]

NORMS = [
    case("_weight_norm", normal(12, 4, 3), normal(12, 1, 1)),
    case("_weight_norm", normal(4, 12, 3), normal(1, 1, 3), 2),
    case("layer_norm", normal(4, 12, dtype=torch.bfloat16), [12], bound=0.02),
    case("rms_norm", normal(4, 12, dtype=torch.float32), [12], bound=1e-5),
    case("batch_norm", normal(4, 12, 3, 2), None, None, None, None, True, 0.1, 1e-3, True),
    *_each("adaptive_max_pool1d", normal(4, 12, 6), [2]),
    case("adaptive_max_pool2d", normal(4, 12, 6, 4), [2, 2]),
    case("upsample_linear1d.vec", normal(4, 12, 3), None, False, [2.0]),
    case("upsample_nearest3d.vec", normal(2, 4, 3, 2, 2), [6, 4, 4], None),
    case("upsample_trilinear3d.vec", normal(2, 4, 3, 2, 2), [5, 4, 3], False, None),
    case("_upsample_nearest_exact2d.vec", normal(4, 12, 3, 2), [6, 4], None),
    *_each(
        "_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec",
        normal(4, 12, 4, 4),
        [2, 2],
        False,
        None,
    ),
]

TARGETS = exactly([1, -100, 3, 0, 7, 7, -100, 2, 5, 4, 6, 1])
WEIGHTS = uniform(8, grad=False)

LOSSES = [
    *[
        case("cross_entropy_loss", normal(12, 8), TARGETS, WEIGHTS, reduction, -100, smoothing)
        for reduction in (0, 1, 2)
        for smoothing in (0.0, 0.1)
    ],
    *[
        case(
            "cross_entropy_loss", normal(12, 8), uniform(12, 8), weight, reduction, -100, smoothing
        )
        for reduction in (0, 1, 2)
        for weight, smoothing in ((None, 0.1), (WEIGHTS, 0.0))
    ],
    case("cross_entropy_loss", normal(4, 8, 6), uniform(4, 8, 6), None, 1),
    case("cross_entropy_loss", normal(4, 8, 6), ints(8, 4, 6), WEIGHTS, 1, 3, 0.2),
    *[
        case(name, normal(12, 8), TARGETS, weight, reduction)
        for name in ("nll_loss", "nll_loss_nd")
        for weight in (None, WEIGHTS)
        for reduction in (0, 1, 2)
    ],
    case("nll_loss_nd", normal(4, 8, 6), ints(8, 4, 6)),
    *[case("binary_cross_entropy", uniform(4, 12), uniform(4, 12), None, r) for r in (0, 1, 2)],
    case("binary_cross_entropy", uniform(4, 12), uniform(4, 12), uniform(12, grad=False)),
    *[
        case("binary_cross_entropy_with_logits", normal(4, 12), uniform(4, 12), None, None, r)
        for r in (0, 1, 2)
    ],
    case(
        "binary_cross_entropy_with_logits",
        normal(4, 12),
        uniform(4, 12),
        uniform(12, grad=False),
        uniform(12, grad=False),
    ),
    *[case("kl_div", normal(4, 12), uniform(4, 12), r) for r in (0, 1, 2)],
    *[case("soft_margin_loss", normal(4, 12), normal(4, 12, grad=False), r) for r in (0, 1, 2)],
    case("poisson_nll_loss", normal(4, 12), uniform(4, 12), True, False, 1e-8, 1),
]

K, V = normal(2, 4, 12, 8), normal(2, 4, 12, 6)

ATTENTION = [
    case("scaled_dot_product_attention", normal(2, 4, 12, 8), K, V, None, 0.0, True, scale=0.2),
    case("scaled_dot_product_attention", normal(2, 4, 8, 8), K, V, None, 0.0, True),
    case(
        "scaled_dot_product_attention", normal(2, 4, 6, 8), normal(2, 1, 12, 8), normal(1, 4, 12, 8)
    ),
    case("scaled_dot_product_attention", normal(12, 8), normal(6, 8), normal(6, 8)),
    case(
        "scaled_dot_product_attention",
        normal(2, 8, 12, 4),
        normal(2, 4, 12, 4),
        normal(2, 4, 12, 4),
        None,
        0.0,
        True,
        enable_gqa=True,
    ),
]

RARE = [
    *ELEMENTWISE,
    *PRODUCTS,
    *VIEWS,
    *REDUCTIONS,
    *LOOKUPS,
    *NORMS,
    *LOSSES,
    *ATTENTION,
    *(
        case(
            "scaled_dot_product_attention",
            normal(2, 12, 4, 6),
            normal(2, kv, 4, 6),
            normal(2, kv, 4, 8),
            *rest,
            enable_gqa=True,
        )
        for kv in (1, 2, 4)
        for rest in ((), (None, 0.0, True), (normal(2, 12, 4, 4, grad=False),))
    ),
]
