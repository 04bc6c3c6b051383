"""Elementwise operators, with broadcasting."""

from __future__ import annotations

from autoshard.graph import TensorMeta
from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import WHOLE, Call, Dims, Names, Operand, Rule, Special

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", "complex64", "complex128"})


def broadcast(call: Call) -> tuple[Names, tuple[Dims, ...], Dims]:
    """Factors of a broadcasting operator: one a dimension of the result."""
    names = Names()
    out = names.fresh_dims(call.out)
    return names, tuple([_aligned(meta, call.out, out) for meta in call.operands]), out


def _aligned(meta: TensorMeta, shape: tuple[int, ...], out: Dims) -> Dims:
    """Dims of an operand whose trailing dimensions line up with the result's."""
    skip = len(shape) - len(meta.shape)
    return tuple(
        [out[skip + i] if size == shape[skip + i] else WHOLE for i, size in enumerate(meta.shape)]
    )


def _is_float(meta: TensorMeta | None) -> bool:
    return meta is not None and meta.dtype in FLOATS


def _pointwise(
    call: Call, linear: tuple[frozenset[int], ...] = (), family: str = "pointwise"
) -> Rule:
    names, operands, out = broadcast(call)
    if not all(map(_is_float, call.results)):
        linear = ()
    linear = tuple(group for group in linear if all(_is_float(call.operands[i]) for i in group))
    return Rule(names.items, operands, (out,) * len(call.results), linear, family=family)


def _nonlinear(call: Call) -> Rule:
    return _pointwise(call)


def _linear(call: Call) -> Rule:
    """Linear in the one tensor that is given first: a sum of shares stays one."""
    return _pointwise(call, (frozenset({0}),))


def _alias(call: Call) -> Rule:
    """As linear, and free: nothing is computed, at most a dtype is changed."""
    same = call.results[0] is not None and call.results[0].dtype == call.operands[0].dtype
    return _pointwise(call, (frozenset({0}),), "view" if same else "pointwise")


def _sum_of_two(call: Call) -> Rule:
    """x + α·y: shares only with shares; a scalar may not be added to a share."""
    both = len(call.operands) == 2
    return _pointwise(call, (frozenset({0, 1}),) if both else ())


def _product(call: Call) -> Rule:
    """Linear in each factor while the other is held fixed."""
    if len(call.operands) == 2:
        same = call.args[0] == call.args[1]
        return _pointwise(call, () if same else (frozenset({0}), frozenset({1})))
    return _linear(call)


def _quotient(call: Call) -> Rule:
    """Linear in the dividend alone; rounding division is not linear."""
    first = call.args[0]
    plain = call.kwargs.get("rounding_mode") is None and isinstance(first, Operand)
    return _pointwise(call, (frozenset({0}),) if plain else ())


def _where(call: Call) -> Rule:
    """Linear in the two branches jointly, where both are tensors."""
    return _pointwise(call, (frozenset({1, 2}),) if len(call.operands) == 3 else ())


def _masked_fill(call: Call) -> Rule:
    """Linear only where what is filled in is zero."""
    zero = call.arg(2, "value") == 0 and len(call.operands) == 2
    return _pointwise(call, (frozenset({0}),) if zero else ())


def _dropout(call: Call) -> Rule:
    """The same mask on every rank where the tensor is whole, masks of their own where it is split."""
    if not call.arg(2, "train", True) or not call.arg(1, "p", 0.5):
        return _alias(call)
    names, operands, out = broadcast(call)
    specials = tuple(Special(name, "split_dropout") for name, _ in names.items)
    return Rule(names.items, operands, (out,), (frozenset({0}),), specials)


def _filled_like(call: Call) -> Rule:
    """A new tensor of the operand's shape; nothing of its values is used."""
    return _pointwise(call)


_NONLINEAR = """
    silu gelu relu relu6 tanh sigmoid exp expm1 log log1p log2 log10 sqrt rsqrt reciprocal sin cos tan
    asin acos atan sinh cosh asinh acosh atanh erf erfc abs sign floor ceil round trunc frac
    softplus mish elu selu celu hardtanh hardswish hardsigmoid leaky_relu log_sigmoid
    clamp clamp_min clamp_max square isnan isinf isfinite logical_not bitwise_not
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar exp2 sinc softshrink hardshrink
    threshold nan_to_num clamp.Tensor special_expm1 logit erfinv lgamma digamma
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor
    gt.Scalar ge.Tensor ge.Scalar logical_and logical_or logical_xor __and__.Tensor __and__.Scalar
    __or__.Tensor __or__.Scalar __xor__.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor
    bitwise_and.Scalar bitwise_or.Scalar maximum minimum max.other min.other fmod.Scalar fmod.Tensor
    remainder.Scalar remainder.Tensor floor_divide floor_divide.Scalar atan2 bitwise_not
    __lshift__.Scalar __rshift__.Scalar bitwise_left_shift.Tensor bitwise_right_shift.Tensor
    rsub.Scalar xlogy.Tensor addcdiv addcmul logaddexp
"""
_LINEAR = "neg real imag conj resolve_conj"
_ALIAS = """
    alias clone contiguous detach to.dtype to.dtype_layout to.device to.other type_as _to_copy
    lift_fresh_copy positive
"""
_LIKE = "zeros_like ones_like empty_like full_like"


def _names(text: str) -> list[str]:
    return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in text.split()]


DEFAULT.add(_names(_NONLINEAR), _nonlinear)
DEFAULT.add(_names(_LINEAR), _linear)
DEFAULT.add(_names(_ALIAS), _alias)
DEFAULT.add(_names(_LIKE), _filled_like)
DEFAULT.add(_names("add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor"), _sum_of_two)
DEFAULT.add(_names("mul.Tensor mul.Scalar"), _product)
DEFAULT.add(
    _names("div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode true_divide.Tensor"), _quotient
)
DEFAULT.add(_names("where.self where.ScalarOther where.ScalarSelf where.Scalar"), _where)
DEFAULT.add(_names("masked_fill.Scalar masked_fill.Tensor"), _masked_fill)
DEFAULT.add(_names("dropout"), _dropout)
