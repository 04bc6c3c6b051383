"""Operators that look elements up."""

from __future__ import annotations

from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import WHOLE, Call, Names, Operand, Rule, Special, whole


@DEFAULT.computed("aten.embedding.default")
def _embedding(call: Call) -> Rule | None:
    """`w[v, d] ids[*b] -> y[*b, d]`: with v split, ids that are not a rank's own give zeros, a share."""
    names, (rows, width) = Names(), call.shape(0)
    by_frequency = bool(
        call.arg(3, "scale_grad_by_freq", False)
    )  # counts ids: all of them, on a rank
    v, d = WHOLE if by_frequency else names.fresh(rows, "v"), names.fresh(width, "d")
    ids = whole(call.shape(1)) if by_frequency else names.fresh_dims(call.shape(1), "b")
    specials = tuple(Special(f, "vocab_embedding") for f in v)
    return Rule(
        names.items,
        ((v, d), ids),
        ((*ids, d),),
        (frozenset({0}),),
        specials,
        "gather",
        contiguous=frozenset(v),
    )


@DEFAULT.computed("aten.index_select.default")
def _index_select(call: Call) -> Rule:
    names, dim = Names(), call.int_arg(1, "dim", 0) % len(call.out)
    y = names.fresh_dims(call.out)
    x = tuple([WHOLE if i == dim else f for i, f in enumerate(y)])
    return Rule(names.items, (x, (y[dim],)), (y,), (frozenset({0}),), family="gather")


@DEFAULT.computed("aten.gather.default")
def _gather(call: Call) -> Rule:
    """Dimensions where index and source agree are independent, but for the one looked along."""
    names, shape = Names(), call.shape(0)
    dim = call.int_arg(1, "dim", 0) % len(shape)
    pairs = zip(shape, call.out, strict=True)
    y = tuple([names.fresh(a) if a == b and i != dim else WHOLE for i, (a, b) in enumerate(pairs)])
    return Rule(names.items, (y, y), (y,), (frozenset({0}),), family="gather")


@DEFAULT.computed("aten.index.Tensor")
def _index(call: Call) -> Rule | None:
    """Leading indexed dimensions with one index each: the rest of the source is independent."""
    given = call.arg(1, "indices")
    if (
        not isinstance(given, tuple)
        or len(call.operands) != 2
        or not isinstance(given[-1], Operand)
    ):
        return None
    index, at = given[-1].meta, len(given) - 1
    if index.dtype == "bool":
        return None
    names = Names()
    y = names.fresh_dims(call.out)
    ids = y[at : at + len(index.shape)]
    x = (*y[:at], WHOLE, *y[at + len(index.shape) :])
    return Rule(names.items, (x, ids), (y,), (frozenset({0}),), family="gather")


@DEFAULT.computed("aten.one_hot.default")
def _one_hot(call: Call) -> Rule:
    names = Names()
    ids = names.fresh_dims(call.shape(0))
    return Rule(names.items, (ids,), ((*ids, WHOLE),), family="gather")
