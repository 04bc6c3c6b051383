"""Losses."""

from __future__ import annotations

from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import Call, Names, Operand, Rule, Special

MEAN, SUM = 1, 2


@DEFAULT.computed("aten.cross_entropy_loss.default")
def _cross_entropy(call: Call) -> Rule | None:
    """`logits[n, c, *rest] target[n, *rest]`.

    With the classes split, each rank reduces its own and only the maximum, the sum and the picked
    logit travel. With the batch split, a mean is the ranks' sums over the whole count.
    """
    shape, target = call.shape(0), call.operands[1]
    if target.dtype.startswith(("float", "bfloat")) or isinstance(call.arg(2, "weight"), Operand):
        return None  # class probabilities and class weights
    names, reduction = Names(), call.int_arg(3, "reduction", MEAN)
    at = 1 if len(shape) > 1 else 0
    classes = names.fresh(shape[at], "c")
    rows = names.fresh_dims(target.shape, "n")
    logits = (*rows[:at], classes, *rows[at:])
    y = rows if reduction == 0 else ()
    specials = [Special(f, "vocab_cross_entropy", ("I",)) for f in classes]
    if reduction == MEAN:
        specials += [Special(f, "mean_cross_entropy") for row in rows for f in row]
    return Rule(
        names.items,
        (logits, rows),
        (y,),
        (),
        tuple(specials),
        "loss",
        contiguous=frozenset(classes),
    )


@DEFAULT.computed(
    "aten.mse_loss.default aten.l1_loss.default aten.smooth_l1_loss.default aten.huber_loss.default"
)
def _elementwise_loss(call: Call) -> Rule | None:
    """A mean over equal shards is the sum of their means, each divided by their number."""
    x, reduction = call.shape(0), call.int_arg(2, "reduction", MEAN)
    if call.shape(1) != x:
        return None
    names = Names()
    dims = names.fresh_dims(x)
    y = dims if reduction == 0 else ()
    specials = tuple(Special(f, "mean") for f, _ in names.items) if reduction == MEAN else ()
    return Rule(names.items, (dims, dims), (y,), (), specials, "loss")
