"""Losses."""

from __future__ import annotations

from autoshard.rules.pointwise import aligned
from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import FLOATS, Call, Dims, Inner, Names, Operand, Rule, Special, statistic

MEAN, SUM = 1, 2

_CLASSES = "each rank has a slice of the classes"
_ROWS = "each rank has a slice of the rows"


@DEFAULT.computed("aten.cross_entropy_loss.default")
def _cross_entropy(call: Call) -> Rule:
    """`logits[n, c, *rest] target[n, *rest] weight[c]`, or `target[n, c, *rest]` of probabilities.

    With the classes split, each rank reduces its own and only the maximum, the sum and the picked
    logit travel. With the batch split, a mean is the ranks' sums over the whole count.
    """
    shape, (logits, target) = call.shape(0), call.operands[:2]
    soft = target.dtype in FLOATS
    names, reduction = Names(), call.int_arg(3, "reduction", MEAN)
    at = 1 if len(shape) > 1 else 0
    classes = names.fresh(shape[at], "c")
    rows = names.fresh_dims((*shape[:at], *shape[at + 1 :]), "n")
    dims: Dims = (*rows[:at], classes, *rows[at:])
    operands: tuple[Dims, ...] = (dims, dims if soft else rows)
    if isinstance(call.arg(2, "weight"), Operand):
        operands += ((classes,),)
    y = rows if reduction == 0 else ()
    specials = [
        Special(f, "vocab_cross_entropy", ("I",), _class_sums(call, shape, at)) for f in classes
    ]
    if reduction == MEAN:
        lowering = "mean" if soft else "mean_cross_entropy"
        dtype = "int64" if len(operands) == 2 else logits.dtype
        why = f"{_ROWS}; this counts those that are not ignored"
        inner = () if soft else (Inner("all_reduce", "forward", (), dtype, why),)
        specials += [Special(f, lowering, (), inner) for row in rows for f in row]
    return Rule(
        names.items, operands, (y,), (), tuple(specials), "loss", contiguous=frozenset(classes)
    )


def _class_sums(call: Call, shape: tuple[int, ...], at: int) -> tuple[Inner, ...]:
    """The maximum of each row, and its sums over the classes; smoothing and weights need more sums."""
    rows = (*shape[:at], *shape[at + 1 :])
    smooth, weighted = bool(call.arg(5, "label_smoothing", 0.0)), len(call.operands) > 2
    sums = 2 + (1 if weighted or call.operands[1].dtype in FLOATS else 0) + 2 * smooth
    meta = call.operands[0]
    greatest = statistic(meta, rows, f"{_CLASSES}; this finds the greatest logit of each row")
    total = f"{_CLASSES}; this sums each row, and finds the logit of its target"
    return greatest + statistic(meta, (sums, *rows), total)


@DEFAULT.computed("aten.nll_loss_nd.default aten.nll_loss.default")
def _nll(call: Call) -> Rule:
    """`logp[n, c, *rest] target[n, *rest] weight[c]`; classes stay whole."""
    shape, reduction = call.shape(0), call.int_arg(3, "reduction", MEAN)
    names, at = Names(), 1 if len(shape) > 1 else 0
    rows = names.fresh_dims((*shape[:at], *shape[at + 1 :]), "n")
    operands: tuple[Dims, ...] = ((*rows[:at], (), *rows[at:]), rows)
    if isinstance(call.arg(2, "weight"), Operand):
        operands += (((),),)
    y = rows if reduction == 0 else ()
    inner = (
        Inner(
            "all_reduce", "forward", (), "int64", f"{_ROWS}; this counts those that are not ignored"
        ),
    )
    specials = [Special(f, "mean_nll", (), inner) for row in rows for f in row]
    return Rule(
        names.items, operands, (y,), (), tuple(specials) if reduction == MEAN else (), "loss"
    )


_ELEMENTWISE = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "kl_div": 2,
    "soft_margin_loss": 2,
    "poisson_nll_loss": 5,
}
"""Losses that compare elements: at which argument the reduction stands."""


@DEFAULT.computed(" ".join(f"aten.{name}.default" for name in _ELEMENTWISE))
def _elementwise_loss(call: Call) -> Rule | None:
    """A mean over equal shards is the sum of their means, each divided by their number."""
    x = call.shape(0)
    reduction = call.int_arg(_ELEMENTWISE[call.target.split(".")[1]], "reduction", MEAN)
    if call.shape(1) != x:
        return None
    names = Names()
    dims = names.fresh_dims(x)
    operands = tuple(aligned(meta.shape, x, dims) for meta in call.operands)
    y = dims if reduction == 0 else ()
    specials = tuple(Special(f, "mean") for f, _ in names.items) if reduction == MEAN else ()
    return Rule(names.items, operands, (y,), (), specials, "loss")
