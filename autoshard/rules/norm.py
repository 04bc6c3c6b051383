"""Normalisations. The normalised dimensions stay whole; the statistics are one rank's own."""

from __future__ import annotations

import math

from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import WHOLE, Call, Dims, Names, Operand, Rule, whole


@DEFAULT.computed("aten.layer_norm.default aten.rms_norm.default")
def _layer_norm(call: Call) -> Rule | None:
    given = call.arg(1, "normalized_shape")
    assert isinstance(given, tuple)
    names, shape = Names(), call.shape(0)
    kept = len(shape) - len(given)
    x = (*names.fresh_dims(shape[:kept]), *whole(shape[kept:]))
    rest = tuple(whole(meta.shape) for meta in call.operands[1:])
    noise = "layer" in call.target and math.prod(shape[kept:]) == 1
    return Rule(names.items, (x, *rest), (x,), family="norm", noise=noise)


@DEFAULT.computed("aten.group_norm.default")
def _group_norm(call: Call) -> Rule | None:
    """Whole groups are the factor of the channels: each rank normalises its own.

    The number of groups is an argument, and the rewriter divides it.
    """
    names, shape = Names(), call.shape(0)
    groups = call.int_arg(1, "num_groups", 1)
    batch, group = names.fresh(shape[0]), names.fresh(groups)
    channels = group + names.fixed(shape[1] // groups)
    x = (batch, channels, *whole(shape[2:]))
    rest = tuple((channels,) for _ in call.operands[1:])
    noise = shape[1] // groups * math.prod(shape[2:]) == 1
    return Rule(
        names.items,
        (x, *rest),
        (x,),
        family="norm",
        contiguous=frozenset(group),
        even=frozenset(group),
        noise=noise,
    )


@DEFAULT.computed("aten.batch_norm.default aten.instance_norm.default")
def _batch_norm(call: Call) -> Rule | None:
    """Channels are the factor. Evaluating, batch and space are too; training, statistics span them."""
    names, shape = Names(), call.shape(0)
    training = bool(call.arg(5, "training", False))
    instance = "instance" in call.target
    keeps = isinstance(call.arg(3, ""), Operand)
    batch = WHOLE if training and (keeps or not instance) else names.fresh(shape[0])
    channels = names.fresh(shape[1])
    space = whole(shape[2:]) if training else names.fresh_dims(shape[2:])
    x: Dims = (batch, channels, *space)
    running = [call.arg(i, "") for i in (3, 4)]
    locked = (
        frozenset(r.position for r in running if isinstance(r, Operand))
        if training
        else frozenset()
    )
    return Rule(
        names.items,
        (x, *(((channels,),) * (len(call.operands) - 1))),
        (x,),
        family="norm",
        locked=locked,
        contiguous=frozenset(channels) if locked else frozenset(),
    )


_POOL = """
    aten.max_pool1d.default aten.max_pool2d.default aten.max_pool3d.default aten.avg_pool1d.default
    aten.avg_pool2d.default aten.avg_pool3d.default aten.adaptive_avg_pool1d.default
    aten.adaptive_avg_pool2d.default aten.adaptive_avg_pool3d.default
    aten.upsample_nearest2d.vec aten.upsample_bilinear2d.vec aten.upsample_nearest1d.vec
    aten.upsample_bicubic2d.vec aten.max_pool2d_with_indices.default
"""


@DEFAULT.computed(_POOL)
def _pool(call: Call) -> Rule | None:
    """Batch and channels are independent; space is pooled."""
    names, shape = Names(), call.shape(0)
    space = int(call.target.split("d.")[0].split("d_")[0][-1])
    lead = names.fresh_dims(shape[:-space])
    dims = (*lead, *((WHOLE,) * space))
    linear = (frozenset({0}),) if "max" not in call.target else ()
    return Rule(names.items, (dims,), (dims,) * len(call.results), linear, family="reduction")
