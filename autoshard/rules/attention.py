"""Scaled dot-product attention."""

from __future__ import annotations

from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import WHOLE, Call, Dim, Dims, Names, Operand, Rule, Special


@DEFAULT.computed("aten.scaled_dot_product_attention.default")
def _attention(call: Call) -> Rule | None:
    """Batch and heads are factors; queries too, where no causal mask counts their positions.

    With `enable_gqa` the query heads are `(kv g)`: g query heads share each key/value head, so the
    key/value heads are the factor that may be split.
    """
    q, k, v = (call.shape(i) for i in range(3))
    if not len(q) == len(k) == len(v) or len(q) < 3 or call.operands[0].dtype == "bool":
        return None
    names, grouped = Names(), bool(call.kwargs.get("enable_gqa", False))
    if (not grouped and q[:-2] != k[:-2]) or q[:-3] != k[:-3]:
        return None  # batch dimensions that broadcast
    batch = names.fresh_dims(q[:-3])
    heads = names.fresh(k[-3])
    groups = names.fixed(q[-3] // k[-3]) if grouped else WHOLE
    causal = bool(call.arg(5, "is_causal", False))
    queries = WHOLE if causal else names.fresh(q[-2])
    keys = (*batch, heads, WHOLE, WHOLE)
    width = names.fresh(v[-1])
    y = (*batch, heads + groups, queries, width)
    operands: list[Dims] = [
        (*batch, heads + groups, queries, WHOLE),
        keys,
        (*batch, heads, WHOLE, width),
    ]
    mask = call.arg(3, "attn_mask")
    if isinstance(mask, Operand):
        operands.append(_mask(mask.meta.shape, q, (*batch, heads + groups, queries)))
    drops = bool(call.arg(4, "dropout_p", 0.0))
    specials = tuple(Special(f, "split_dropout") for f, _ in names.items) if drops else ()
    return Rule(names.items, tuple(operands), (y,), (frozenset({2}),), specials, family="attention")


def _mask(shape: tuple[int, ...], q: tuple[int, ...], dims: tuple[Dim, ...]) -> Dims:
    """A mask broadcasts over batch, heads and queries; its last dimension, keys, stays whole."""
    skip = len(q) - len(shape)
    lead = [dims[skip + i] if n == q[skip + i] else WHOLE for i, n in enumerate(shape[:-1])]
    return (*lead, WHOLE)
