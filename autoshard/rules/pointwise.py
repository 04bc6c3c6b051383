"""Elementwise operators, with broadcasting."""

from __future__ import annotations

from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import (
    COMPLEX,
    FLOATS,
    WHOLE,
    Call,
    Dims,
    Names,
    Operand,
    Rule,
    Special,
    whole,
)

Groups = tuple[frozenset[int], ...]


def broadcast(call: Call) -> tuple[Names, tuple[Dims, ...], Dims]:
    """Factors of a broadcasting operator: one a dimension of the result."""
    names = Names()
    out = names.fresh_dims(call.out)
    return names, tuple([aligned(meta.shape, call.out, out) for meta in call.operands]), out


def aligned(given: tuple[int, ...], shape: tuple[int, ...], out: Dims) -> Dims:
    """Dims of an operand whose trailing dimensions line up with the result's."""
    skip = len(shape) - len(given)
    if skip < 0:
        return whole(given)
    return tuple([out[skip + i] if n == shape[skip + i] else WHOLE for i, n in enumerate(given)])


def linear_in(call: Call, *groups: set[int]) -> Groups:
    """The groups of operands in which the operator is linear, where shares of them make sense.

    A share is a float or complex number whose sum is meant: a cast to whole numbers is not linear.
    """
    numbers = FLOATS | COMPLEX
    if any(meta is None or meta.dtype not in numbers for meta in call.results):
        return ()
    found = [
        frozenset(group)
        for group in groups
        if all(call.operands[i].dtype in numbers for i in group)
    ]
    return tuple(found)


def _pointwise(call: Call, *groups: set[int], family: str = "pointwise") -> Rule:
    names, operands, out = broadcast(call)
    results = (out,) * len(call.results)
    return Rule(names.items, operands, results, linear_in(call, *groups), family=family)


def _nonlinear(call: Call) -> Rule:
    return _pointwise(call)


def _linear(call: Call) -> Rule:
    """Linear in the one tensor that is given first: a sum of shares stays one."""
    return _pointwise(call, {0})


def _alias(call: Call) -> Rule:
    """As linear, and free: nothing is computed, at most a dtype is changed."""
    same = call.results[0] is not None and call.results[0].dtype == call.operands[0].dtype
    return _pointwise(call, {0}, family="view" if same else "pointwise")


def _sum_of_two(call: Call) -> Rule:
    """x + α·y: shares only with shares; a scalar may not be added to a share."""
    return _pointwise(call, *([{0, 1}] if len(call.operands) == 2 else []))


def _product(call: Call) -> Rule:
    """Linear in each factor while the other is held fixed."""
    return _pointwise(call, *({i} for i in range(len(call.operands))))


def _quotient(call: Call) -> Rule:
    """Linear in the dividend alone; rounding division is not linear."""
    plain = call.kwargs.get("rounding_mode") is None and isinstance(call.args[0], Operand)
    return _pointwise(call, *([{0}] if plain else []))


def _where(call: Call) -> Rule:
    """Linear in the two branches jointly, where both are tensors, and in one beside a zero."""
    if len(call.operands) == 3:
        return _pointwise(call, {1, 2})
    zero = call.arg(1) == 0 or call.arg(2) == 0
    return _pointwise(call, *([{1}] if zero and len(call.operands) == 2 else []))


def _masked_fill(call: Call) -> Rule:
    """Linear where what is filled in is zero, or a tensor that is a share too."""
    if len(call.operands) == 3:
        return _pointwise(call, {0, 2})
    return _pointwise(call, *([{0}] if call.arg(2, "value") == 0 else []))


def _dropout(call: Call) -> Rule:
    """The same mask on every rank where the tensor is whole, masks of their own where it is split."""
    if not call.arg(2, "train", True) or not call.arg(1, "p", 0.5):
        return _alias(call)
    names, operands, out = broadcast(call)
    specials = tuple(Special(name, "split_dropout") for name, _ in names.items)
    return Rule(names.items, operands, (out,), linear_in(call, {0}), specials)


def _copied(call: Call) -> Rule:
    """The second tensor, broadcast to the first one's shape; the first one's values are not used."""
    return _pointwise(call, {1}, {0, 1})


def _as_other(call: Call) -> Rule:
    """A cast to another tensor's dtype: of that tensor only the dtype is used."""
    names = Names()
    x = names.fresh_dims(call.out)
    other = x if call.shape(1) == call.out else whole(call.shape(1))
    return Rule(names.items, (x, other), (x,), linear_in(call, {0}))


def _new(call: Call) -> Rule:
    """A new tensor, whole; of the operand only dtype and device are used, so any slice of it will do."""
    names = Names()
    x = names.fresh_dims(call.shape(0))
    specials = tuple(Special(name, "", ("I",)) for name, _ in names.items)
    return Rule(names.items, (x,), (whole(call.out),), (), specials)


def _prelu(call: Call) -> Rule:
    """One slope for each channel, dimension 1, or one for all."""
    names, shape = Names(), call.shape(0)
    x = names.fresh_dims(shape)
    slope = (x[1],) if len(shape) > 1 and call.shape(1) == (shape[1],) else whole(call.shape(1))
    return Rule(names.items, (x, slope), (x,))


def _bucketize(call: Call) -> Rule:
    """Each number is looked up by itself among the boundaries, which stay whole."""
    names = Names()
    x = names.fresh_dims(call.out)
    return Rule(names.items, (x, whole(call.shape(1))), (x,))


_NONLINEAR = """
    silu gelu relu relu6 tanh sigmoid exp expm1 log log1p log2 log10 sqrt rsqrt reciprocal sin cos tan
    asin acos atan sinh cosh asinh acosh atanh erf erfc abs sign floor ceil round trunc frac
    softplus mish elu selu celu hardtanh hardswish hardsigmoid leaky_relu log_sigmoid
    clamp clamp_min clamp_max square isnan isinf isfinite logical_not bitwise_not
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar exp2 sinc softshrink hardshrink
    threshold nan_to_num clamp.Tensor special_expm1 logit erfinv lgamma digamma
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor
    gt.Scalar ge.Tensor ge.Scalar logical_and logical_or logical_xor __and__.Tensor __and__.Scalar
    __or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar bitwise_and.Tensor bitwise_or.Tensor
    bitwise_xor.Tensor bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar
    maximum minimum max.other min.other fmod.Scalar fmod.Tensor fmax fmin
    remainder.Scalar remainder.Tensor floor_divide floor_divide.Scalar atan2 hypot
    __lshift__.Scalar __rshift__.Scalar bitwise_left_shift.Tensor bitwise_right_shift.Tensor
    rsub.Scalar xlogy.Tensor addcdiv addcmul logaddexp logaddexp2 angle sgn deg2rad rad2deg
    clamp_min.Tensor clamp_max.Tensor float_power.Tensor_Scalar isneginf isposinf signbit polar
    absolute clip special_xlog1py copysign.Tensor heaviside i0 isclose hardtanh arctan arctan2
    greater.Scalar greater.Tensor less.Scalar less.Tensor greater_equal.Scalar less_equal.Scalar
    not_equal.Scalar not_equal.Tensor
"""
_LINEAR = "neg negative real imag conj resolve_conj resolve_neg conj_physical"
_ALIAS = """
    alias clone contiguous detach to.dtype to.dtype_layout to.device _to_copy lift_fresh_copy positive
"""
_LIKE = "zeros_like ones_like empty_like full_like fill.Scalar zero"


def _names(text: str) -> list[str]:
    return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in text.split()]


DEFAULT.add(_names(_NONLINEAR), _nonlinear)
DEFAULT.add(_names(_LINEAR), _linear)
DEFAULT.add(_names(_ALIAS), _alias)
DEFAULT.add(_names(_LIKE), _nonlinear)
DEFAULT.add(_names("to.other type_as"), _as_other)
DEFAULT.add(_names("new_zeros new_ones new_full new_empty"), _new)
DEFAULT.add(
    _names("add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor subtract.Tensor lerp.Scalar"),
    _sum_of_two,
)
DEFAULT.add(_names("mul.Tensor mul.Scalar multiply.Tensor"), _product)
DEFAULT.add(
    _names(
        "div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode true_divide.Tensor divide.Tensor"
    ),
    _quotient,
)
DEFAULT.add(_names("where.self where.ScalarOther where.ScalarSelf where.Scalar"), _where)
DEFAULT.add(_names("masked_fill.Scalar masked_fill.Tensor"), _masked_fill)
DEFAULT.add(_names("copy fill.Tensor"), _copied)
DEFAULT.add(_names("dropout"), _dropout)
DEFAULT.add(_names("prelu"), _prelu)
DEFAULT.add(_names("bucketize.Tensor"), _bucketize)
