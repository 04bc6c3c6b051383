"""Reductions, and operators that look along a dimension (softmax, cumsum, sort)."""

from __future__ import annotations

from autoshard.rules.pointwise import FLOATS
from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import WHOLE, Call, Dim, Names, Rule, Special


def _reduced(call: Call, index: int, name: str) -> set[int]:
    """The dimensions that are reduced; all of them where none is named."""
    rank = len(call.shape(0))
    given = call.arg(index, name, ())
    if isinstance(given, int):
        given = (given,)
    if not isinstance(given, tuple) or not given:
        return set(range(rank))
    return {d % rank for d in given if isinstance(d, int)} if rank else set()


def _kept(x: tuple[Dim, ...], reduced: set[int], rank: int) -> tuple[Dim, ...]:
    """Dims of a result of `rank` dimensions: reduced ones are dropped, or kept with size 1."""
    if rank == len(x):
        return tuple([WHOLE if i in reduced else dim for i, dim in enumerate(x)])
    return tuple([dim for i, dim in enumerate(x) if i not in reduced])


def _reduction(call: Call, index: int, name: str, *, summed: bool, mean: bool) -> Rule:
    names, shape = Names(), call.shape(0)
    reduced = _reduced(call, index, name)
    may_split = summed and call.operands[0].dtype in FLOATS
    x = tuple(
        [WHOLE if i in reduced and not may_split else names.fresh(n) for i, n in enumerate(shape)]
    )
    specials = tuple(Special(f, "mean") for d in sorted(reduced) for f in x[d]) if mean else ()
    results = tuple([_kept(x, reduced, len(meta.shape)) if meta else None for meta in call.results])
    linear = (frozenset({0}),) if may_split else ()
    return Rule(names.items, (x,), results, linear, specials, "reduction")


@DEFAULT.computed("aten.sum.dim_IntList aten.sum.default")
def _sum(call: Call) -> Rule:
    return _reduction(call, 1, "dim", summed=True, mean=False)


@DEFAULT.computed("aten.mean.dim aten.mean.default")
def _mean(call: Call) -> Rule:
    """A split mean is the sum of the ranks' means, each divided by their number."""
    return _reduction(call, 1, "dim", summed=True, mean=True)


@DEFAULT.computed(
    "aten.amax.default aten.amin.default aten.var.correction aten.var.dim aten.std.correction aten.std.dim "
    "aten.max.dim aten.min.dim aten.argmax.default aten.argmin.default aten.any.dim aten.all.dim "
    "aten.prod.dim_int aten.logsumexp.default aten.linalg_vector_norm.default aten.norm.ScalarOpt_dim "
    "aten.var_mean.correction aten.max.default aten.min.default aten.any.default aten.all.default"
)
def _not_summed(call: Call) -> Rule:
    index = 2 if "norm" in call.target else 1
    return _reduction(call, index, "dim", summed=False, mean=False)


@DEFAULT.computed(
    "aten.softmax.int aten._softmax.default aten.log_softmax.int aten._log_softmax.default "
    "aten.cumsum.default aten.cumprod.default aten.sort.default aten.argsort.default aten.glu.default "
    "aten.topk.default"
)
def _along(call: Call) -> Rule:
    """One dimension is looked along, and stays whole; the others are independent."""
    names, shape = Names(), call.shape(0)
    topk = call.target == "aten.topk.default"
    dim = call.int_arg(2 if topk else 1, "dim", -1) % max(len(shape), 1)
    x = tuple([WHOLE if i == dim else names.fresh(size) for i, size in enumerate(shape)])
    linear = (frozenset({0}),) if call.target == "aten.cumsum.default" else ()
    return Rule(names.items, (x,), (x,) * len(call.results), linear, family="reduction")
