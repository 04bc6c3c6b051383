"""Reductions, and operators that look along a dimension (softmax, cumsum, sort).

Sums are split freely: the ranks' sums are shares. What else a split dimension can be reduced to, each
rank reduces its slice to a statistic, and the statistics are reduced over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.rules.pointwise import linear_in
from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import (
    COMPLEX,
    FLOATS,
    WHOLE,
    Call,
    Dim,
    Dims,
    Inner,
    Names,
    Rule,
    Special,
    statistic,
    whole,
)
from autoshard.rules.view import dim_of


def _reduced(call: Call, index: int, name: str) -> set[int]:
    """The dimensions that are reduced; all of them where none is named."""
    rank = len(call.shape(0))
    given = call.arg(index, name, ())
    if isinstance(given, int):
        given = (given,)
    if not isinstance(given, tuple) or not given:
        return set(range(rank))
    return {d % max(rank, 1) for d in given if isinstance(d, int)} & set(range(rank))


def _kept(x: Dims, reduced: set[int], rank: int) -> Dims:
    """Dims of a result of `rank` dimensions: reduced ones are dropped, or kept with size 1."""
    if rank == len(x):
        return tuple([WHOLE if i in reduced else dim for i, dim in enumerate(x)])
    return tuple([dim for i, dim in enumerate(x) if i not in reduced])


def _reduction(
    call: Call,
    reduced: set[int],
    *,
    split: bool = True,
    linear: bool = False,
    special: Special | None = None,
    contiguous: bool = False,
) -> Rule:
    """A reduction of some dimensions.

    Args:
        call: the call.
        reduced: which dimensions.
        split: whether the reduced ones may be split: the results are then shares, or `special`'s.
        linear: whether it is a sum, so that it takes shares too.
        special: what runs where a reduced dimension is split; its factor is filled in.
        contiguous: whether reduced ones may be split in one block only.
    """
    names, shape = Names(), call.shape(0)
    x = tuple(
        [WHOLE if i in reduced and not split else names.fresh(n) for i, n in enumerate(shape)]
    )
    factors = [f for d in sorted(reduced) if d < len(x) for f in x[d]]
    specials = [
        Special(f, special.lowering, special.results, special.inner) for f in factors if special
    ]
    results = tuple([_kept(x, reduced, len(meta.shape)) if meta else None for meta in call.results])
    groups = linear_in(call, {0}) if linear else ()
    return Rule(
        names.items,
        (x,),
        results,
        groups,
        tuple(specials),
        "reduction",
        contiguous=frozenset(factors) if contiguous else frozenset(),
    )


# --- sums ---------------------------------------------------------------------------------------


@DEFAULT.computed("aten.sum.dim_IntList aten.sum.default")
def _sum(call: Call) -> Rule:
    return _reduction(call, _reduced(call, 1, "dim"), linear=True)


@DEFAULT.computed("aten.nansum.default aten.count_nonzero.dim_IntList aten.count_nonzero.default")
def _count(call: Call) -> Rule:
    return _reduction(call, _reduced(call, 1, "dim"))


@DEFAULT.computed("aten.mean.dim aten.mean.default")
def _mean(call: Call) -> Rule:
    """A split mean is the sum of the ranks' means, each divided by their number."""
    return _reduction(call, _reduced(call, 1, "dim"), linear=True, special=Special("", "mean"))


# --- reductions to a statistic ------------------------------------------------------------------

_SLICE = "each rank has a slice of the dimension that is reduced"


@DEFAULT.computed("aten.amax.default aten.amin.default aten.max.default aten.min.default")
def _extreme(call: Call) -> Rule:
    """The greatest of the ranks' greatest; its gradient is shared by the elements equal to it."""
    name = "greatest" if "max" in call.target else "least"
    inner = _statistics(call, f"{_SLICE}; this finds the {name} element")
    if call.operands[0].grad:
        inner += _statistics(call, f"{_SLICE}; this counts the elements that are the {name}")
    special = Special("", "split_extreme", ("I",), inner)
    split = call.operands[0].dtype not in ("bool", "uint8")
    return _reduction(call, _reduced(call, 1, "dim"), split=split, special=special)


@DEFAULT.computed(
    "aten.any.dim aten.all.dim aten.any.dims aten.all.dims aten.any.default aten.all.default"
)
def _any(call: Call) -> Rule:
    inner = (
        Inner(
            "all_reduce", "forward", call.out, "uint8", f"{_SLICE}; this finds whether any is true"
        ),
    )
    special = Special("", "split_any", ("I",), inner)
    return _reduction(call, _reduced(call, 1, "dim"), special=special)


@DEFAULT.computed("aten.logsumexp.default")
def _logsumexp(call: Call) -> Rule:
    inner = _statistics(
        call, f"{_SLICE}; this finds the greatest element", f"{_SLICE}; this sums the exponentials"
    )
    special = Special("", "split_logsumexp", ("I",), inner)
    split = call.operands[0].dtype in FLOATS
    return _reduction(call, _reduced(call, 1, "dim"), split=split, special=special)


@DEFAULT.computed("aten.linalg_vector_norm.default aten.norm.ScalarOpt_dim aten.norm.Scalar")
def _norm(call: Call) -> Rule:
    """The 2-norm is the root of a sum; the 1-norm is a sum itself."""
    order = call.arg(1, "ord" if "vector" in call.target else "p", 2)
    plain = call.kwargs.get("dtype") is None and call.operands[0].dtype in FLOATS | COMPLEX
    inner = _statistics(call, f"{_SLICE}; this sums the squares")
    special = Special("", "split_vector_norm", ("I",), inner) if order in (2, None) else None
    reduced = _reduced(call, 2, "dim")
    return _reduction(call, reduced, split=plain and order in (1, 2, None), special=special)


@DEFAULT.computed("aten.var.correction aten.var.dim aten.std.correction aten.std.dim")
def _variance(call: Call) -> Rule:
    inner = _statistics(
        call, f"{_SLICE}; this sums it", f"{_SLICE}; this sums the squares around the mean"
    )
    special = Special("", "split_variance", ("I",), inner)
    split = call.operands[0].dtype in FLOATS
    return _reduction(call, _reduced(call, 1, "dim"), split=split, special=special)


def _statistics(call: Call, *reasons: str) -> tuple[Inner, ...]:
    return statistic(call.operands[0], call.out, *reasons)


@DEFAULT.computed(
    "aten.max.dim aten.min.dim aten.var_mean.correction "
    "aten.prod.dim_int aten.median.dim aten.aminmax.default aten.std_mean.correction "
    "aten.kthvalue.default"
)
def _whole(call: Call) -> Rule:
    """The reduced dimensions stay whole."""
    index = 2 if "kthvalue" in call.target else 1
    reduced = {dim_of(call, 2, -1)} if index == 2 else _reduced(call, 1, "dim")
    return _reduction(call, reduced, split=False)


@DEFAULT.computed("aten.argmax.default aten.argmin.default")
def _place(call: Call) -> Rule:
    """With its dimension split, the first of the ranks' extremes that is the extreme."""
    given, meta = call.arg(1, "dim"), call.operands[0]
    if not isinstance(given, int) or not meta.shape or meta.dtype == "bool":
        return _reduction(call, _reduced(call, 1, "dim"), split=False)
    dim = given % len(meta.shape)
    rows = (*meta.shape[:dim], 1, *meta.shape[dim + 1 :])
    inner = tuple(
        Inner("all_gather", "forward", rows, dtype, f"{_SLICE}; this gathers {what}", per_rank=True)
        for dtype, what in ((meta.dtype, "their extremes"), ("int64", "where those are"))
    )
    special = Special("", "shared_argmax", ("I",), inner)
    return _reduction(call, {dim}, special=special, contiguous=True)


@DEFAULT.computed("aten.histc.default")
def _histogram(call: Call) -> Rule:
    """Counts of a slice are a share, where the bins don't depend on what is counted."""
    low, high = call.arg(2, "min", 0), call.arg(3, "max", 0)
    names, shape = Names(), call.shape(0)
    x = names.fresh_dims(shape) if low != high else whole(shape)
    return Rule(names.items, (x,), ((WHOLE,),), family="reduction")


# --- along a dimension --------------------------------------------------------------------------


@DEFAULT.computed(
    "aten.softmax.int aten._softmax.default aten.log_softmax.int aten._log_softmax.default "
    "aten.special_softmax.default aten._safe_softmax.default"
)
def _softmax(call: Call) -> Rule:
    """With its dimension split, the maximum and the sum of exponentials are reduced over the ranks."""
    dim, shape = dim_of(call, 1), call.shape(0)
    rows = (*shape[:dim], 1, *shape[dim + 1 :]) if shape else ()
    inner = statistic(
        call.operands[0],
        rows,
        f"{_SLICE}; this finds the greatest element",
        f"{_SLICE}; this sums the exponentials",
        backward=(f"{_SLICE}; its gradients of the sum are summed",),
    )
    split = "safe" not in call.target and call.operands[0].dtype in FLOATS
    return _along(call, (dim,), Special("", "split_softmax", (), inner) if split else None)


@DEFAULT.computed("aten.cumsum.default")
def _cumsum(call: Call) -> Rule:
    """With its dimension split, each rank adds the totals of those before it."""
    dim, shape = dim_of(call, 1), call.shape(0)
    if not shape:
        return _along(call, ())
    totals = (*shape[:dim], 1, *shape[dim + 1 :])
    meta = call.operands[0]
    why = f"{_SLICE}; this gathers their sums"
    inner = [Inner("all_gather", "forward", totals, meta.dtype, why, per_rank=True)]
    if meta.grad:
        inner.append(
            Inner(
                "reduce_scatter",
                "backward",
                totals,
                meta.dtype,
                f"{_SLICE}; this sums the gradients of their sums",
                per_rank=True,
            )
        )
    plain = call.kwargs.get("dtype") is None and meta.dtype != "bool"
    special = Special("", "split_cumsum", (), tuple(inner)) if plain else None
    return _along(call, (dim,), special, contiguous=True, linear=True)


@DEFAULT.computed(
    "aten.cumprod.default aten.logcumsumexp.default aten.cummax.default aten.cummin.default"
)
def _cumulative(call: Call) -> Rule:
    return _along(call, (dim_of(call, 1),))


@DEFAULT.computed("aten.sort.default aten.sort.stable aten.argsort.default aten.argsort.stable")
def _sort(call: Call) -> Rule:
    return _along(call, (dim_of(call, 1, -1),))


@DEFAULT.computed("aten.topk.default")
def _topk(call: Call) -> Rule:
    return _along(call, (dim_of(call, 2, -1),))


@DEFAULT.computed(
    "aten.fft_fft.default aten.fft_ifft.default aten.fft_rfft.default aten.fft_irfft.default"
)
def _fft(call: Call) -> Rule:
    return _along(call, (dim_of(call, 2, -1),), linear=True)


@DEFAULT.computed(
    "aten.fft_fftn.default aten.fft_ifftn.default aten.fft_fft2.default aten.fft_ifft2.default"
)
def _fftn(call: Call) -> Rule:
    rank = len(call.shape(0))
    given = call.arg(2, "dim", (-2, -1) if "2" in call.target else None)
    dims = tuple(range(rank)) if given is None else given
    assert isinstance(dims, tuple)
    return _along(call, [d % rank for d in dims], linear=True)


def _along(
    call: Call,
    dims: Iterable[int],
    special: Special | None = None,
    *,
    contiguous: bool = False,
    linear: bool = False,
) -> Rule:
    """Some dimensions are looked along: they stay whole, or `special` runs; the rest is independent."""
    names, shape = Names(), call.shape(0)
    inside = set(dims) & set(range(len(shape)))  # a number has no dimension to look along
    x = [WHOLE if i in inside and not special else names.fresh(n) for i, n in enumerate(shape)]
    factors = [f for d in sorted(inside) for f in x[d]]
    specials = [
        Special(f, special.lowering, special.results, special.inner) for f in factors if special
    ]
    groups = linear_in(call, {0}) if linear else ()
    return Rule(
        names.items,
        (tuple(x),),
        (tuple(x),) * len(call.results),
        groups,
        tuple(specials),
        "reduction",
        contiguous=frozenset(factors) if contiguous else frozenset(),
    )


@DEFAULT.computed("aten.glu.default")
def _glu(call: Call) -> Rule:
    """Halves of one dimension are multiplied: two blocks of the result's."""
    names, dim = Names(), dim_of(call, 1, -1)
    y = names.fresh_dims(call.out)
    x: list[Dim] = list(y)
    x[dim] = names.fixed(2) + y[dim]
    return Rule(names.items, (tuple(x),), (y,), family="pointwise")


@DEFAULT.computed("aten.cosine_similarity.default")
def _cosine_similarity(call: Call) -> Rule | None:
    """Vectors along one dimension are compared; the others are independent."""
    names, (a, b) = Names(), (call.shape(0), call.shape(1))
    if len(a) != len(b):
        return None
    dim = call.int_arg(2, "dim", 1) % len(a)
    y = names.fresh_dims(call.out)
    rest = (*y[:dim], WHOLE, *y[dim:])
    sizes = (*call.out[:dim], 1, *call.out[dim:])
    x, z = (
        tuple([d if n == size else WHOLE for d, n, size in zip(rest, shape, sizes, strict=True)])
        for shape in (a, b)
    )
    return Rule(names.items, (x, z), (y,), family="reduction")
