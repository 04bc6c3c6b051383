"""Operators that multiply and sum: linear, matrix products, einsum, convolution."""

from __future__ import annotations

from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import WHOLE, Call, Dim, Dims, Names, Operand, Rule, Special
from autoshard.rules.template import Template

BILINEAR = (frozenset({0}), frozenset({1}))

# Capture splits a bias off, so that a row-parallel product is reduced before it is added, once.
# Where one is left, the summed factor stays whole.
_LINEAR = Template.parse("x[*b, i] w[o, i] -> y[*b, o]", linear="x|w")
_LINEAR_BIAS = Template.parse("x[*b, ·] w[o, ·] bias[o] -> y[*b, o]")

DEFAULT.template("aten.mm.default", "x[m, k] w[k, n] -> y[m, n]", linear="x|w")
DEFAULT.template("aten.bmm.default", "x[b, m, k] w[b, k, n] -> y[b, m, n]", linear="x|w")
DEFAULT.template("aten.mv.default", "x[m, k] w[k] -> y[m]", linear="x|w")
DEFAULT.template("aten.dot.default", "x[k] w[k] -> y[]", linear="x|w")
DEFAULT.template("aten.outer.default", "x[m] w[n] -> y[m, n]", linear="x|w")
DEFAULT.template("aten.addmm.default", "bias[m?, n?] x[m, ·] w[·, n] -> y[m, n]")
DEFAULT.template("aten.baddbmm.default", "bias[b?, m?, n?] x[b, m, ·] w[b, ·, n] -> y[b, m, n]")


@DEFAULT.computed("aten.linear.default")
def _linear(call: Call) -> Rule | None:
    return (_LINEAR_BIAS if len(call.operands) == 3 else _LINEAR).bind(call)


@DEFAULT.computed("aten.matmul.default")
def _matmul(call: Call) -> Rule | None:
    """Batch dimensions broadcast; vectors on either side lose their dimension."""
    (a, b), names = (meta.shape for meta in call.operands), Names()
    if not a or not b or call.args[0] == call.args[1]:
        return None
    k = names.fresh(a[-1], "k")
    m = names.fresh(a[-2], "m") if len(a) > 1 else None
    n = names.fresh(b[-1], "n") if len(b) > 1 else None
    tail = [dim for dim in (m, n) if dim is not None]
    batch = call.out[: len(call.out) - len(tail)]
    y = names.fresh_dims(batch, "b")
    x = _batch(a[:-2], batch, y) + ((m,) if m is not None else ()) + (k,)
    w = _batch(b[:-2], batch, y) + ((k, n) if n is not None else (k,))
    return Rule(names.items, (x, w), ((*y, *tail),), BILINEAR, family="contraction")


def _batch(shape: tuple[int, ...], batch: tuple[int, ...], y: Dims) -> Dims:
    skip = len(batch) - len(shape)
    return tuple([y[skip + i] if n == batch[skip + i] else WHOLE for i, n in enumerate(shape)])


@DEFAULT.computed("aten.einsum.default")
def _einsum(call: Call) -> Rule | None:
    """The equation is the rule. Ellipses and repeated letters within one operand have none."""
    equation = call.arg(0, "equation")
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    sizes: dict[str, int] = {}
    for term, meta in zip(terms, call.operands, strict=True):
        if len(set(term)) != len(term):
            return None
        for letter, size in zip(term, meta.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    if any(
        m.shape[i] != sizes[c]
        for t, m in zip(terms, call.operands, strict=True)
        for i, c in enumerate(t)
    ):
        return None

    def dims(term: str) -> Dims:
        return tuple([(letter,) if sizes[letter] > 1 else WHOLE for letter in term])

    kept = tuple((letter, size) for letter, size in sizes.items() if size > 1)
    linear = tuple(frozenset({i}) for i in range(len(terms)))
    return Rule(kept, tuple(map(dims, terms)), (dims(right),), linear, family="contraction")


@DEFAULT.computed("transformers.grouped_mm_fallback.default aten._grouped_mm.default")
def _grouped(call: Call) -> Rule | None:
    """`x[·, i] w[·, i, o] ends[·] -> y[·, o]`: rows in order of their experts, each times its expert's.

    With the experts split, each rank multiplies the rows of its own; the others are zeros, a share.
    """
    if len(call.operands) != 3 or len(call.shape(0)) != 2 or len(call.shape(1)) != 3:
        return None  # other groupings; a bias
    names, (experts, inner, outer) = Names(), call.shape(1)
    if "fallback" in call.target:
        e, i, o = names.fresh(experts, "e"), names.fresh(inner, "i"), names.fresh(outer, "o")
    else:
        e, i, o = WHOLE, _aligned(names, inner), _aligned(names, outer)
    return Rule(
        names.items,
        ((WHOLE, i), (e, i, o), (WHOLE,)),
        ((WHOLE, o),),
        BILINEAR,
        tuple(Special(f, "expert_products") for f in e),
        "contraction",
        contiguous=frozenset(e),
    )


def _aligned(names: Names, size: int) -> Dim:
    """A dimension cut in multiples of 8 elements: torch's kernel wants rows on 16 bytes."""
    return names.fresh(size // 8) + names.fixed(8) if size % 8 == 0 else WHOLE


_CONV = "aten.conv1d.default aten.conv2d.default aten.conv3d.default aten.conv1d.padding aten.conv2d.padding"
_CONV_TRANSPOSED = (
    "aten.conv_transpose1d.default aten.conv_transpose2d.input aten.conv_transpose3d.input"
)


@DEFAULT.computed(f"{_CONV} {_CONV_TRANSPOSED}")
def _convolution(call: Call) -> Rule | None:
    """Batch, groups, and channels inside each group are factors; space stays whole.

    A weight is `[(g o), i, …]`, or `[(g i), o, …]` where transposed; the input's channels are `(g i)`
    and the result's `(g o)`. Capture splits a bias off; where one is left, `i` may not be split.
    """
    x, w, names = call.shape(0), call.shape(1), Names()
    if len(x) != len(w):
        return None  # an input without a batch dimension
    groups, biased = call.int_arg(6, "groups", 1), isinstance(call.arg(2, "bias"), Operand)
    batch, group = names.fresh(x[0]), names.fresh(groups)
    inner = names.fixed(x[1] // groups) if biased else names.fresh(x[1] // groups)
    outer, space = names.fresh(call.out[1] // groups), (WHOLE,) * (len(w) - 2)
    transposed = call.target in _CONV_TRANSPOSED
    weight = (group + inner, outer) if transposed else (group + outer, inner)
    operands = ((batch, group + inner, *space), (*weight, *space))
    if biased:
        operands += ((group + outer,),)
    result = (batch, group + outer, *space)
    linear = () if biased else BILINEAR
    even = frozenset(group)
    return Rule(names.items, operands, (result,), linear, family="contraction", even=even)
