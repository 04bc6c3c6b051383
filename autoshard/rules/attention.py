"""Scaled dot-product attention."""

from __future__ import annotations

from autoshard.rules.pointwise import aligned
from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import WHOLE, Call, Dim, Dims, Names, Operand, Rule, Special


@DEFAULT.computed("aten.scaled_dot_product_attention.default")
def _attention(call: Call) -> Rule | None:
    """Batch, heads, queries and the values' width are factors; keys stay whole.

    With `enable_gqa` the query heads are `(kv g)`: g query heads share each key/value head, so the
    key/value heads are the factor that may be split. Under a causal mask a rank's queries have
    positions of their own, and see no later keys. Where there are fewer key/value heads than ranks, the
    query heads may be split all the same: each rank takes the key/value heads of its own.
    """
    q, k, v = (call.shape(i) for i in range(3))
    grouped = bool(call.kwargs.get("enable_gqa", False))
    if not len(q) == len(k) == len(v) or len(q) < (3 if grouped else 2):
        return None
    names = Names()
    queries, width = names.fresh(q[-2]), names.fresh(v[-1])
    kv_heads: Dim = names.fresh(k[-3]) if grouped else WHOLE
    if grouped:
        heads = kv_heads + names.fixed(call.out[-3] // k[-3])
        batch: Dims = (*names.fresh_dims(call.out[:-3]), heads)
    else:
        batch = names.fresh_dims(call.out[:-2])
    kv = batch if not grouped else (*batch[:-1], kv_heads)
    shapes = [call.out[:-2], k[:-2], v[:-2]] if grouped else [call.out[:-2]] * 3
    keys, values = (aligned(x[:-2], shape, kv) for x, shape in zip((k, v), shapes[1:], strict=True))
    dims = (*aligned(q[:-2], shapes[0], batch), queries, WHOLE)
    operands: list[Dims] = [dims, (*keys, WHOLE, WHOLE), (*values, WHOLE, width)]
    mask = call.arg(3, "attn_mask")
    if isinstance(mask, Operand):
        scores = (*call.out[:-1], k[-2])
        operands.append(aligned(mask.meta.shape, scores, (*batch, queries, WHOLE)))
    specials, joint = _specials(call, names, queries), ()
    if grouped and call.out[-3] > k[-3]:
        names.sizes["heads"] = call.out[-3]
        specials += (Special("heads", "grouped_queries"),)
        at = {0: len(q) - 3, **_of_heads(mask)}
        taken = tuple((False, which, dim, 1) for which, dim in at.items())
        joint = (("heads", (*taken, (True, 0, len(call.out) - 3, 1))),)
    contiguous = frozenset(queries) if call.arg(5, "is_causal", False) else frozenset()
    return Rule(
        names.items,
        tuple(operands),
        ((*batch, queries, width),),
        (frozenset({2}),),
        specials,
        "attention",
        contiguous=contiguous | {name for name, _ in joint},
        joint=joint,
    )


def _of_heads(mask: object) -> dict[int, int]:
    """The dimension of a mask's heads, by its operand, where each query head has one of its own."""
    shape = mask.meta.shape if isinstance(mask, Operand) else ()
    return {3: len(shape) - 3} if len(shape) > 2 and shape[-3] > 1 else {}


def _specials(call: Call, names: Names, queries: Dim) -> tuple[Special, ...]:
    drops, causal = bool(call.arg(4, "dropout_p", 0.0)), bool(call.arg(5, "is_causal", False))
    lowered = [(f, "causal_queries") for f in queries if causal]
    if drops:
        lowered += [(f, "split_dropout") for f, _ in names.items if not (causal and f in queries)]
    return tuple(Special(factor, lowering) for factor, lowering in lowered)
