"""Normalisations.

Where a normalised dimension is split, the ranks reduce its sum and sum of squares, and each normalises
its own slice.
"""

from __future__ import annotations

import math

from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import (
    WHOLE,
    Call,
    Dim,
    Dims,
    Inner,
    Names,
    Operand,
    Rule,
    Special,
    statistic,
    whole,
)

_SLICE = "each rank has a slice of what is normalised"
_MEAN, _SQUARES = f"{_SLICE}; this sums it", f"{_SLICE}; this sums the squares around the mean"
_BACK = f"{_SLICE}; its gradients of the statistics are summed"


def _specials(lowering: str, dims: Dims, inner: tuple[Inner, ...]) -> tuple[Special, ...]:
    return tuple(Special(factor, lowering, (), inner) for dim in dims for factor in dim)


@DEFAULT.computed("aten.layer_norm.default aten.rms_norm.default")
def _layer_norm(call: Call) -> Rule:
    given = call.arg(1, "normalized_shape")
    assert isinstance(given, tuple)
    names, shape, meta = Names(), call.shape(0), call.operands[0]
    kept = len(shape) - len(given)
    x = names.fresh_dims(shape)
    rows = shape[:kept]
    if "layer" in call.target:
        inner = statistic(meta, rows, _MEAN, _SQUARES, backward=(_BACK, _BACK))
    else:
        inner = statistic(meta, rows, f"{_SLICE}; this sums the squares", backward=(_BACK,))
    lowering = call.target.split(".")[1]
    rest = (x[kept:],) * (len(call.operands) - 1)
    specials = _specials(f"split_{lowering}", x[kept:], inner)
    noise = "layer" in call.target and math.prod(shape[kept:]) == 1
    return Rule(names.items, (x, *rest), (x,), (), specials, "norm", noise=noise)


@DEFAULT.computed("aten.group_norm.default")
def _group_norm(call: Call) -> Rule:
    """Whole groups are a factor of the channels: each rank normalises its own.

    Channels inside the groups, and space, are normalised: where they are split, statistics are reduced.
    """
    names, shape = Names(), call.shape(0)
    groups = call.int_arg(1, "num_groups", 1)
    batch, group = names.fresh(shape[0]), names.fresh(groups)
    inside, space = names.fresh(shape[1] // groups), names.fresh_dims(shape[2:])
    channels = group + inside
    x = (batch, channels, *space)
    rest = ((channels,),) * (len(call.operands) - 1)
    inner = statistic(
        call.operands[0], (shape[0], groups), _MEAN, _SQUARES, backward=(_BACK, _BACK)
    )
    specials = _specials("split_group_norm", (inside, *space), inner)
    noise = shape[1] // groups * math.prod(shape[2:]) == 1
    even = frozenset(group)
    return Rule(names.items, (x, *rest), (x,), (), specials, "norm", even=even, noise=noise)


@DEFAULT.computed("aten.batch_norm.default")
def _batch_norm(call: Call) -> Rule:
    """Channels are the factor. Training, statistics span batch and space, and running ones are written."""
    names, shape = Names(), call.shape(0)
    training = bool(call.arg(5, "training", False))
    x = names.fresh_dims(shape)
    channels = x[1]
    inner = statistic(call.operands[0], (shape[1],), _MEAN, _SQUARES, backward=(_BACK, _BACK))
    spanned = (x[0], *x[2:])
    specials = _specials("split_batch_norm", spanned, inner) if training else ()
    return _with_running(call, names, x, channels, specials, writes=training)


@DEFAULT.computed("aten.instance_norm.default")
def _instance_norm(call: Call) -> Rule:
    """Batch and channels are factors; running statistics are means over the batch."""
    names, shape = Names(), call.shape(0)
    own = bool(call.arg(5, "use_input_stats", True))
    writes = own and isinstance(call.arg(3, ""), Operand)
    batch = WHOLE if writes else names.fresh(shape[0])
    channels = names.fresh(shape[1])
    space = whole(shape[2:]) if own else names.fresh_dims(shape[2:])
    return _with_running(call, names, (batch, channels, *space), channels, (), writes=writes)


def _with_running(
    call: Call, names: Names, x: Dims, channels: Dim, specials: tuple[Special, ...], *, writes: bool
) -> Rule:
    """A norm whose other operands have one dimension, the channels; running ones may be written."""
    rest = ((channels,),) * (len(call.operands) - 1)
    running = [call.arg(i, "") for i in (3, 4)]
    locked = (
        frozenset(r.position for r in running if isinstance(r, Operand)) if writes else frozenset()
    )
    contiguous = frozenset(channels) if locked else frozenset()
    return Rule(
        names.items, (x, *rest), (x,), (), specials, "norm", contiguous=contiguous, locked=locked
    )


@DEFAULT.computed("aten._weight_norm.default")
def _weight_norm(call: Call) -> Rule | None:
    """Each slice of one dimension has a norm and a scale of its own; its squares may be split."""
    names, shape, dim = Names(), call.shape(0), call.int_arg(2, "dim", 0)
    if dim < 0 or len(call.shape(1)) != len(shape):
        return None
    v = names.fresh_dims(shape)
    g = tuple([d if i == dim else WHOLE for i, d in enumerate(v)])
    why = (f"{_SLICE}; this sums the squares",)
    inner = statistic(call.operands[0], (shape[dim],), *why, backward=(_BACK,))
    specials = _specials("split_weight_norm", (*v[:dim], *v[dim + 1 :]), inner)
    even = frozenset(v[dim])  # torch's kernel divides by the size
    return Rule(names.items, (v, g), (v,), (frozenset({1}),), specials, "norm", even=even)
