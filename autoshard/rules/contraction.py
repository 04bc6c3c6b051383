"""Operators that multiply and sum: linear, matrix products, einsum."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.rules.pointwise import linear_in
from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import WHOLE, Call, Dim, Dims, Inner, Names, Rule, Special, whole
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
    """The equation is the rule; a letter that one operand has twice, a diagonal, stays whole."""
    equation = call.arg(0, "equation")
    if not isinstance(equation, str):
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [
        _spelled(term, len(meta.shape))
        for term, meta in zip(left.split(","), call.operands, strict=True)
    ]
    out = _spelled(right, len(call.out)) if arrow else _implied(terms)
    sizes: dict[str, int] = {}
    for term, meta in zip(terms, call.operands, strict=True):
        for letter, size in zip(term, meta.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    twice = {letter for term in terms for letter in term if term.count(letter) > 1}
    kept = {c: n for c, n in sizes.items() if n > 1 and c not in twice}

    def dims(term: Sequence[str], shape: Sequence[int]) -> Dims:
        pairs = zip(term, shape, strict=True)
        return tuple([(c,) if kept.get(c, 1) == n and n > 1 else WHOLE for c, n in pairs])

    operands = [dims(term, meta.shape) for term, meta in zip(terms, call.operands, strict=True)]
    linear = linear_in(call, *({i} for i in range(len(terms))))
    result = dims(out, call.out)
    return Rule(tuple(kept.items()), tuple(operands), (result,), linear, family="contraction")


def _spelled(term: str, rank: int) -> list[str]:
    """A term's letters, the dimensions of an ellipsis numbered from the last one."""
    head, dots, tail = term.partition("...")
    count = rank - len(head) - len(tail) if dots else 0
    return [*head, *(f"_{i}" for i in reversed(range(count))), *tail]


def _implied(terms: list[list[str]]) -> list[str]:
    """The result where none is given: ellipses, then letters that occur once, sorted."""
    every = [letter for term in terms for letter in term]
    dots = sorted({c for c in every if len(c) > 1}, key=lambda c: -int(c[1:]))
    return [*dots, *sorted(c for c in set(every) if len(c) == 1 and every.count(c) == 1)]


@DEFAULT.computed("transformers.grouped_mm_fallback.default aten._grouped_mm.default")
def _grouped(call: Call) -> Rule | None:
    """`x[·, i] w[·, i, o] ends[·] -> y[·, o]`: rows in order of their experts, each times its expert's.

    With the experts split, each rank multiplies the rows of its own; the others are zeros, a share.
    """
    if len(call.operands) != 3 or len(call.shape(0)) != 2 or len(call.shape(1)) != 3:
        return None  # other groupings; a bias
    names, (experts, inner, outer) = Names(), call.shape(1)
    e = names.fresh(experts, "e")
    if "fallback" in call.target:
        i, o = names.fresh(inner, "i"), names.fresh(outer, "o")
    else:
        i, o = _aligned(names, inner), _aligned(names, outer)
    specials = tuple(Special(f, "expert_products") for f in e)
    joint = lengths = ()
    rows = call.shape(0)[0]
    if e and rows > 1:
        names.sizes["rows"] = rows
        joint = (("rows", ((False, 0, 0, 1), (False, 1, 0, 1), (True, 0, 0, 1))),)
        lengths = (("rows", (experts,)),)
        specials += (Special("rows", "exchanged_products", (), _exchanged(call)),)
    return Rule(
        names.items,
        ((WHOLE, i), (e, i, o), (WHOLE,)),
        ((WHOLE, o),),
        BILINEAR,
        specials,
        "contraction",
        contiguous=frozenset(e) | {name for name, _ in joint},
        joint=joint,
        lengths=lengths,
        apart=frozenset(name for name, _ in joint),
    )


_UNEVEN = 4
"""Of sorted rows, one in so many is taken to lie on another rank than its expert does."""


def _exchanged(call: Call) -> tuple[Inner, ...]:
    """Rows to their experts and products back, and their gradients: where experts have alike, few of them."""
    found = []
    for (count, width), meta in (
        (call.shape(0), call.operands[0]),
        (call.out, call.results[0] or call.operands[0]),
    ):
        way = "rows that lie beside their experts' ranks travel"
        shape = (-(-count // _UNEVEN), width)
        found.append(
            Inner(
                "all_to_all",
                "forward",
                shape,
                meta.dtype,
                f"experts are split, and so are rows; {way}",
            )
        )
        if meta.grad:
            found.append(
                Inner(
                    "all_to_all",
                    "backward",
                    shape,
                    meta.dtype,
                    f"experts are split, and so are rows; gradients of {way}",
                )
            )
    return tuple(found)


def _aligned(names: Names, size: int) -> Dim:
    """A dimension cut in multiples of 8 elements: torch's kernel wants rows on 16 bytes."""
    return names.fresh(size // 8) + names.fixed(8) if size % 8 == 0 else WHOLE


# --- products that know more than their factors ---------------------------------------------------

DEFAULT.template("aten.cdist.default", "x[*b, m, ·] w[*b, n, ·] -> y[*b, m, n]")
DEFAULT.template(
    "aten.bilinear.default", "x[*b, i] z[*b, j] w[o, i, j] -> y[*b, o]", linear="x|z|w"
)
DEFAULT.template(
    "aten.grid_sampler.default", "x[n, c, ·, ·] grid[n, h, w, ·] -> y[n, c, h, w]", linear="x"
)


@DEFAULT.computed("aten.linalg_solve_triangular.default")
def _solve_triangular(call: Call) -> Rule:
    """Every system of equations, and every right side, is solved by itself."""
    names, a, b = Names(), call.shape(0), call.shape(1)
    left = bool(call.kwargs.get("left", True))
    y = names.fresh_dims(call.out[:-2], "b")
    sides = names.fresh(call.out[-1 if left else -2], "k")
    tail = (WHOLE, sides) if left else (sides, WHOLE)
    batch = call.out[:-2]
    systems = (*_batch(a[:-2], batch, y), WHOLE, WHOLE)
    right = (*_batch(b[:-2], batch, y), *tail)
    return Rule(
        names.items, (systems, right), ((*y, *tail),), (frozenset({1}),), family="reduction"
    )


@DEFAULT.computed("aten.lstm.input aten.gru.input aten.rnn_tanh.input aten.rnn_relu.input")
def _recurrent(call: Call) -> Rule | None:
    """The batch is independent; features and time stay whole."""
    dropout, train, batch_first = call.arg(5), call.arg(6), call.arg(8)
    if dropout and train:
        return None  # masks between the layers
    names, states = Names(), 2 if "lstm" in call.target else 1
    batch = names.fresh(call.shape(0)[0 if batch_first else 1])
    x = (batch, WHOLE, WHOLE) if batch_first else (WHOLE, batch, WHOLE)
    state = (WHOLE, batch, WHOLE)
    weights = tuple(whole(meta.shape) for meta in call.operands[1 + states :])
    operands = (x, *(state,) * states, *weights)
    return Rule(names.items, operands, (x, *(state,) * states), family="contraction")


@DEFAULT.computed("aten.lstm_cell.default aten.gru_cell.default aten.rnn_tanh_cell.default")
def _recurrent_cell(call: Call) -> Rule:
    names, states = Names(), 2 if "lstm" in call.target else 1
    row = (*names.fresh_dims(call.shape(0)[:-1]), WHOLE)
    weights = tuple(whole(meta.shape) for meta in call.operands[1 + states :])
    operands = (*(row,) * (1 + states), *weights)
    return Rule(names.items, operands, (row,) * states, family="contraction")
