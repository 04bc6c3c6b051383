"""Operators that slide over space, or stretch it: convolutions, pooling, interpolation.

Batch and channels are factors as elsewhere. Space is one too: a rank's slice of the result reads its slice of
the operand and a few rows beside it, a halo, which the ranks exchange. What is read may be of another length
than what is made, so a spatial factor is named beside the dimensions: a whole dimension of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.rules.contraction import BILINEAR
from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import (
    FLOATS,
    WHOLE,
    Call,
    Dim,
    Inner,
    Names,
    Operand,
    Place,
    Rule,
    Special,
)

_CONV = "aten.conv1d.default aten.conv2d.default aten.conv3d.default aten.conv1d.padding aten.conv2d.padding"
_CONV_TRANSPOSED = (
    "aten.conv_transpose1d.default aten.conv_transpose2d.input aten.conv_transpose3d.input"
)
_SLICE = "each rank has a slice of space"


@dataclass(frozen=True)
class _Spatial:
    """Factors of space, one for each dimension that may be split: what a `Rule` takes of them."""

    joint: tuple[tuple[str, tuple[Place, ...]], ...] = ()
    lengths: tuple[tuple[str, tuple[int, ...]], ...] = ()
    specials: tuple[Special, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Of the factors: none may be cut in blocks."""
        return frozenset(name for name, _ in self.joint)


def _spatial(call: Call, names: Names, lowering: str, edges: dict[int, int]) -> _Spatial:
    """Space of the first operand and the first result, from dimension to width of the edges exchanged."""
    found = _Spatial()
    for dim, width in edges.items():
        length, made = call.shape(0)[dim], call.out[dim]
        if min(length, made) < 2:
            continue
        name = f"s{dim}"
        names.sizes[name] = made
        places = ((False, 0, dim, 1), (True, 0, dim, 1))
        special = Special(name, lowering, (), _exchanged(call, dim, width))
        found = _Spatial(
            (*found.joint, (name, places)),
            (*found.lengths, (name, (length,))),
            (*found.specials, special),
        )
    return found


def _exchanged(call: Call, dim: int, width: int) -> tuple[Inner, ...]:
    """The exchange of edges that are `width` rows together, and that of their gradients."""
    if not width:
        return ()
    meta, shape = call.operands[0], list(call.shape(0))
    shape[dim] = width
    why = f"{_SLICE}; this gathers the edges"
    found = (Inner("all_gather", "forward", tuple(shape), meta.dtype, why, per_rank=True),)
    if meta.grad:
        back = f"{_SLICE}; this sums the edges' gradients"
        found += (
            Inner("reduce_scatter", "backward", tuple(shape), meta.dtype, back, per_rank=True),
        )
    return found


def _each(value: object, count: int, default: int) -> list[int]:
    """A number for each dimension of space, of an argument that may be one for all."""
    if isinstance(value, int):
        return [value] * count
    given = [v for v in value if isinstance(v, int)] if isinstance(value, Sequence) else []
    return given * count if len(given) == 1 else given or [default] * count


@DEFAULT.computed(f"{_CONV} {_CONV_TRANSPOSED}")
def _convolution(call: Call) -> Rule | None:
    """Batch, groups, channels inside each group, and space are factors.

    A weight is `[(g o), i, …]`, or `[(g i), o, …]` where transposed; the input's channels are `(g i)`
    and the result's `(g o)`. Capture splits a bias off; where one is left, `i` may not be split.
    """
    x, w, names = call.shape(0), call.shape(1), Names()
    lead = len(x) - len(w) + 1  # 0 for an input without a batch dimension
    groups, biased = call.int_arg(6, "groups", 1), isinstance(call.arg(2, "bias"), Operand)
    batch, group = names.fresh_dims(x[:lead]), names.fresh(groups)
    inner = names.fixed(x[lead] // groups) if biased else names.fresh(x[lead] // groups)
    outer, space = names.fresh(call.out[lead] // groups), (WHOLE,) * (len(w) - 2)
    transposed = call.target in _CONV_TRANSPOSED
    weight = (group + inner, outer) if transposed else (group + outer, inner)
    operands = ((*batch, group + inner, *space), (*weight, *space))
    if biased:
        operands += ((group + outer,),)
    spatial = _spatial(call, names, _HALO[transposed], _conv_edges(call, lead + 1, transposed))
    return Rule(
        names.items,
        operands,
        ((*batch, group + outer, *space),),
        () if biased else BILINEAR,
        spatial.specials,
        "contraction",
        contiguous=spatial.names,
        even=frozenset(group),
        joint=spatial.joint,
        lengths=spatial.lengths,
    )


_HALO = {False: "halo_convolution", True: "halo_transposed"}


def _conv_edges(call: Call, first: int, transposed: bool) -> dict[int, int]:
    """For each dimension of space, from `first` on, the rows that a slice reads beside its own."""
    kernel = call.shape(1)[2:]
    count, padding = len(kernel), call.arg(4, "padding", 0)
    stride = _each(call.arg(3, "stride"), count, 1)
    dilation = _each(call.arg(7 if transposed else 5, "dilation"), count, 1)
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    if isinstance(padding, str):
        before = [r // 2 if padding == "same" else 0 for r in reach]
    else:
        before = _each(padding, count, 0)
    edges = {}
    for i, (s, p, r) in enumerate(zip(stride, before, reach, strict=True)):
        length, made = call.shape(0)[first + i], call.out[first + i]
        if transposed:  # result j comes from operands (j + p - r) / s to (j + p) / s
            rows = max(-(-(r - p) // s), 0) + (s - 1 + p) // s + abs(made - s * length) // s
        else:
            rows = p + max(r + 1 - s - p, 0) + abs(length - s * made)
        edges[first + i] = rows
    return edges


# --- pooling ------------------------------------------------------------------------------------

_WHOLE_SPACE = """
    max_pool2d_with_indices.default adaptive_max_pool1d.default adaptive_max_pool2d.default
    upsample_linear1d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec upsample_trilinear3d.vec
    _upsample_nearest_exact2d.vec _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec
"""


def _named(names: str) -> str:
    return " ".join(f"aten.{name}" for name in names.split())


def _dims(call: Call) -> int:
    """How many dimensions of space an operator has: the 2 of `avg_pool2d`."""
    pairs = zip(call.target, call.target[1:], strict=False)
    return next(int(a) for a, b in pairs if a.isdigit() and b == "d")


@DEFAULT.computed(_named(_WHOLE_SPACE))
def _whole_space(call: Call) -> Rule:
    """Batch and channels are independent; space is pooled or stretched."""
    names, count = Names(), _dims(call)
    dims = (*names.fresh_dims(call.shape(0)[:-count]), *((WHOLE,) * count))
    linear = (frozenset({0}),) if "max" not in call.target else ()
    return Rule(names.items, (dims,), (dims,) * len(call.results), linear, family="reduction")


@DEFAULT.computed(
    _named(
        "max_pool1d.default max_pool2d.default max_pool3d.default "
        "avg_pool1d.default avg_pool2d.default avg_pool3d.default"
    )
)
def _pool(call: Call) -> Rule:
    """Batch, channels and space are factors; windows reach into a neighbour's slice."""
    names, count = Names(), _dims(call)
    dims = (*names.fresh_dims(call.shape(0)[:-count]), *((WHOLE,) * count))
    most = "max" in call.target
    spatial = _spatial(call, names, "halo_pool", _pool_edges(call, count, most))
    return Rule(
        names.items,
        (dims,),
        (dims,),
        () if most else (frozenset({0}),),
        spatial.specials,
        "reduction",
        contiguous=spatial.names,
        joint=spatial.joint,
        lengths=spatial.lengths,
    )


def _pool_edges(call: Call, count: int, most: bool) -> dict[int, int]:
    """As `_conv_edges`; without dimensions whose last window hangs over, or whose padding is not counted."""
    if call.operands[0].dtype not in FLOATS:
        return {}
    kernel = _each(call.arg(1, "kernel_size"), count, 1)
    stride = _each(call.arg(2, "stride"), count, 0)
    stride = [s or k for s, k in zip(stride, kernel, strict=True)]
    padding = _each(call.arg(3, "padding"), count, 0)
    dilation = _each(call.arg(4, "dilation") if most else 1, count, 1)
    ceiling = bool(call.arg(5 if most else 4, "ceil_mode", False))
    counted = most or bool(call.arg(5, "count_include_pad", True))
    first, edges = len(call.out) - count, {}
    for i, (k, s, p, d) in enumerate(zip(kernel, stride, padding, dilation, strict=True)):
        length, made, reach = call.shape(0)[first + i], call.out[first + i], (k - 1) * d
        hangs = ceiling and (length + 2 * p - reach - 1) % s
        if not hangs and (counted or not p):
            edges[first + i] = p + max(reach + 1 - s - p, 0) + abs(length - s * made)
    return edges


@DEFAULT.computed(
    _named("adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default")
)
def _adaptive(call: Call) -> Rule:
    """Batch and channels are independent; space that is averaged to one number is a mean."""
    names, count, shape = Names(), _dims(call), call.shape(0)
    lead = names.fresh_dims(shape[:-count])
    made = call.out[-count:]
    space: tuple[Dim, ...] = tuple(
        [names.fresh(n) if m == 1 else WHOLE for n, m in zip(shape[-count:], made, strict=True)]
    )
    specials = tuple(Special(f, "mean") for dim in space for f in dim)
    result = (*lead, *((WHOLE,) * count))
    linear = (frozenset({0}),)
    return Rule(names.items, ((*lead, *space),), (result,), linear, specials, "reduction")


@DEFAULT.computed(_named("upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec"))
def _nearest(call: Call) -> Rule:
    """Each element again and again: 2, 4, 8, … times a slice is the slice of the result, exactly."""
    names, count, shape = Names(), _dims(call), call.shape(0)
    lead = names.fresh_dims(shape[:-count])
    x, y = [*lead], [*lead]
    for n, made in zip(shape[-count:], call.out[-count:], strict=True):
        times, rest = divmod(made, n)
        dim = names.fresh(n) if not rest and times & (times - 1) == 0 else WHOLE
        x.append(dim)
        y.append(dim + names.fixed(times) if dim else WHOLE)
    return Rule(names.items, (tuple(x),), (tuple(y),), (frozenset({0}),), family="reduction")
