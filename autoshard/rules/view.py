"""Operators that rearrange: views, permutations, slices, splits, concatenations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autoshard.rules.pointwise import aligned, linear_in
from autoshard.rules.recut import recuts
from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import WHOLE, Call, Dim, Dims, Names, Rule

FIRST = (frozenset({0}),)


def _rule(names: Names, x: Dims, y: Dims, count: int = 1, family: str = "view") -> Rule:
    """One operand, to which the operator is linear, and `count` results alike."""
    return Rule(names.items, (x,), (y,) * count, FIRST, family=family)


def common_factors(names: Names, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[Dims, Dims]:
    """Factor two shapes of equal size into the same factors, outer to inner.

    A dimension is then the product of its factors: `[B, S, 3·H]` against `[B, S, 3, H]` gives
    `[b, s, (t h)]` and `[b, s, t, h]`. Where sizes do not nest, `[4, 6]` against `[6, 4]`, what the
    first dimensions have in common is a factor still, and the rest stays whole.
    """
    left: list[Dim] = [WHOLE] * len(old)
    right: list[Dim] = [WHOLE] * len(new)
    i = j = 0
    while i < len(old) and j < len(new):
        end_i, end_j = _group(old, new, i, j)
        factors = _nest(old[i:end_i], new[j:end_j])
        if factors is not None:
            named = [names.fresh(size) for size in factors]
            _assign(left, i, old[i:end_i], factors, named)
            _assign(right, j, new[j:end_j], factors, named)
        else:
            common = math.gcd(old[i], new[j])
            outer = names.fresh(common)
            left[i] = outer + names.fixed(old[i] // common)
            right[j] = outer + names.fixed(new[j] // common)
        i, j = end_i, end_j
    return tuple(left), tuple(right)


def _group(old: tuple[int, ...], new: tuple[int, ...], i: int, j: int) -> tuple[int, int]:
    """The shortest runs from i and j with one product."""
    a, b = old[i], new[j]
    i, j = i + 1, j + 1
    while a != b:
        if a < b and i < len(old):
            a, i = a * old[i], i + 1
        elif j < len(new):
            b, j = b * new[j], j + 1
        else:
            return len(old), len(new)
    return i, j


def _nest(old: tuple[int, ...], new: tuple[int, ...]) -> list[int] | None:
    """Sizes of the factors that both runs are products of, or None where there are none."""
    cuts = sorted(set(_cuts(old)) | set(_cuts(new)))
    sizes = []
    for outer, inner in zip(cuts[1:], cuts, strict=False):
        if outer % inner:
            return None
        sizes.append(outer // inner)
    return sizes[::-1]


def _cuts(sizes: tuple[int, ...]) -> list[int]:
    """Products of the trailing sizes: where a row-major layout has its strides."""
    found = [1]
    for size in reversed(sizes):
        found.append(found[-1] * size)
    return found


def _assign(
    dims: list[Dim], start: int, sizes: tuple[int, ...], factors: list[int], named: list[Dim]
) -> None:
    at = 0
    for offset, size in enumerate(sizes):
        product, dim = 1, []
        while product < size:
            product *= factors[at]
            dim += named[at]
            at += 1
        dims[start + offset] = tuple(dim)


@DEFAULT.computed(
    "aten.view.default aten.reshape.default aten._unsafe_view.default aten.unflatten.int "
    "aten.flatten.using_ints aten.unsqueeze.default aten.squeeze.dim aten.squeeze.default "
    "aten.squeeze.dims aten.view_as.default aten.reshape_as.default aten.ravel.default"
)
def _reshape(call: Call) -> Rule | None:
    """Of the second tensor of `view_as` only the shape is used."""
    if 0 in call.out or isinstance(call.arg(1), str):
        return None
    names = Names()
    x, y = common_factors(names, call.shape(0), call.out)
    anew = recuts(call, names, x, y)
    return Rule(
        names.items,
        (x, y)[: len(call.operands)],
        (y,),
        FIRST,
        anew.specials,
        "view",
        contiguous=anew.names,
        joint=anew.joint,
        lengths=anew.lengths,
        instead=anew.instead,
    )


@DEFAULT.computed("aten.expand.default aten.broadcast_to.default aten.expand_as.default")
def _expand(call: Call) -> Rule:
    """New leading dimensions, and stretched ones, are copies: each rank makes those of its slice."""
    names = Names()
    y = names.fresh_dims(call.out)
    x = aligned(call.shape(0), call.out, y)
    return Rule(names.items, (x, y)[: len(call.operands)], (y,), FIRST, family="view")


@DEFAULT.computed(
    "aten.permute.default aten.transpose.int aten.t.default aten.mT.default aten.numpy_T.default "
    "aten.swapaxes.default aten.swapdims.default aten.movedim.int aten.movedim.intlist "
    "aten.moveaxis.int aten.moveaxis.intlist aten.adjoint.default"
)
def _permute(call: Call) -> Rule | None:
    names = Names()
    x = names.fresh_dims(call.shape(0))
    y = tuple([x[d] for d in _order(call, len(x))])
    return _rule(names, x, y)


def _order(call: Call, rank: int) -> list[int]:
    """For each dimension of the result, which of the operand it is."""
    name = call.target.split(".")[1]
    if name == "permute":
        return [d % rank for d in _ints(call, 1, "dims")]
    if name == "numpy_T":
        return list(reversed(range(rank)))
    if name in ("movedim", "moveaxis") and rank:
        source = [d % rank for d in _ints(call, 1, "source")]
        target = [d % rank for d in _ints(call, 2, "destination")]
        rest = iter([d for d in range(rank) if d not in source])
        return [source[target.index(d)] if d in target else next(rest) for d in range(rank)]
    order = list(range(rank))
    if rank > 1:
        named = name in ("transpose", "swapaxes", "swapdims")
        a = call.int_arg(1, "dim0", 0) if named else -2
        b = call.int_arg(2, "dim1", 1) if named else -1
        order[a], order[b] = order[b], order[a]
    return order


def _ints(call: Call, index: int, name: str) -> tuple[int, ...]:
    """An argument that is a list of whole numbers, or one."""
    given = call.arg(index, name, ())
    return (given,) if isinstance(given, int) else tuple(given)  # type: ignore[arg-type]


def dim_of(call: Call, index: int, default: int = 0, name: str = "dim") -> int:
    """An argument that names a dimension of the first operand, from 0 up."""
    return call.int_arg(index, name, default) % max(len(call.shape(0)), 1)


# --- parts and wholes ---------------------------------------------------------------------------


def _parts(names: Names, sizes: Sequence[int], offset: int = 0) -> tuple[Dim, list[Dim]]:
    """Factor a dimension that is parts laid end to end, after `offset`, and perhaps a rest.

    All are multiples of one size, their factor; the whole and each part are blocks of it. A fused
    `[3·H]` is three blocks, a `[Q + K + V]` with Q = 4·K is six, of which q has four.
    """
    *parts, whole = sizes
    unit = math.gcd(*sizes, offset)
    if 0 in sizes or unit == 1:
        return WHOLE, [WHOLE for _ in parts]
    factor = names.fresh(unit)
    return names.fixed(whole // unit) + factor, [names.fixed(n // unit) + factor for n in parts]


@DEFAULT.computed("aten.slice.Tensor aten.narrow.default")
def _slice(call: Call) -> Rule:
    """A slice is a run of blocks of the dimension, where its start and length allow it."""
    names, dim = Names(), dim_of(call, 1)
    size, length = call.shape(0)[dim], call.out[dim]
    x = [WHOLE if i == dim else names.fresh(n) for i, n in enumerate(call.shape(0))]
    y = list(x)
    if call.target == "aten.narrow.default" or call.int_arg(4, "step", 1) == 1:
        start = call.int_arg(2, "start", 0)
        start = max(start + size, 0) if start < 0 else start
        x[dim], (y[dim],) = _parts(names, (length, size), min(start, size))
    return _rule(names, tuple(x), tuple(y))


@DEFAULT.computed("aten.select.int aten.unbind.int")
def _select(call: Call) -> Rule:
    names, dim = Names(), dim_of(call, 1)
    y = names.fresh_dims(call.out)
    return _rule(names, (*y[:dim], WHOLE, *y[dim:]), y, len(call.results))


@DEFAULT.computed(
    "aten.split.Tensor aten.split_with_sizes.default aten.chunk.default aten.split.sizes "
    "aten.unsafe_split.Tensor aten.unsafe_chunk.default aten.tensor_split.sections"
)
def _split(call: Call) -> Rule:
    """The parts are runs of blocks of the whole."""
    names, dim, shape = Names(), dim_of(call, 2), call.shape(0)
    lead = [WHOLE if i == dim else names.fresh(size) for i, size in enumerate(shape)]
    sizes = [meta.shape[dim] for meta in call.results if meta]
    x, parts = _parts(names, (*sizes, shape[dim]))
    results = tuple([_with(lead, dim, part) for part in parts])
    return Rule(names.items, (_with(lead, dim, x),), results, FIRST, family="view")


def _with(dims: Sequence[Dim], dim: int, factors: Dim) -> Dims:
    return (*dims[:dim], factors, *dims[dim + 1 :])


@DEFAULT.computed("aten.cat.default aten.concat.default aten.concatenate.default")
def _cat(call: Call) -> Rule | None:
    """The parts are runs of blocks of the whole."""
    names, out = Names(), call.out
    shapes = [meta.shape for meta in call.operands]
    if any(len(shape) != len(out) for shape in shapes):
        return None  # an empty vector, which torch lets pass
    dim = call.int_arg(1, "dim", 0) % len(out)
    lead = [WHOLE if i == dim else names.fresh(size) for i, size in enumerate(out)]
    y, parts = _parts(names, (*[shape[dim] for shape in shapes], out[dim]))
    operands = tuple([_with(lead, dim, part) for part in parts])
    groups = linear_in(call, set(range(len(operands))))
    return Rule(names.items, operands, (_with(lead, dim, y),), groups)


@DEFAULT.computed("aten.stack.default")
def _stack(call: Call) -> Rule:
    names, dim = Names(), call.int_arg(1, "dim", 0) % len(call.out)
    x = names.fresh_dims(call.shape(0))
    count = len(call.operands)
    y = (*x[:dim], WHOLE, *x[dim:])
    return Rule(names.items, (x,) * count, (y,), linear_in(call, set(range(count))))


@DEFAULT.computed("aten.slice_scatter.default aten.select_scatter.default")
def _placed(call: Call) -> Rule:
    """A part is put in the place of a slice, or of one index: that dimension stays whole."""
    names, dim = Names(), dim_of(call, 2)
    x = [WHOLE if i == dim else names.fresh(n) for i, n in enumerate(call.out)]
    part = x if "slice" in call.target else x[:dim] + x[dim + 1 :]
    return Rule(names.items, (tuple(x), tuple(part)), (tuple(x),), linear_in(call, {0, 1}))


# --- copies and moves ---------------------------------------------------------------------------


@DEFAULT.computed("aten.repeat.default aten.tile.default")
def _repeat(call: Call) -> Rule:
    """Copies laid end to end are blocks."""
    names, shape = Names(), call.shape(0)
    skip = len(call.out) - len(shape)
    x = names.fresh_dims(shape)
    pairs = zip(shape, call.out[skip:], x, strict=True)
    y = [names.fixed(many // one) + dim if one else WHOLE for one, many, dim in pairs]
    return _rule(names, x, (WHOLE,) * skip + tuple(y), family="pointwise")


@DEFAULT.computed("aten.repeat_interleave.self_int")
def _repeat_interleave(call: Call) -> Rule | None:
    """Each element is repeated where it stands: copies are the inner factor of the dimension."""
    if not isinstance(call.arg(2, "dim"), int):
        return None
    names, dim = Names(), dim_of(call, 2)
    x = names.fresh_dims(call.shape(0))
    copies = names.fixed(call.int_arg(1, "repeats", 1))
    return _rule(names, x, _with(x, dim, x[dim] + copies), family="pointwise")


@DEFAULT.computed("aten.flip.default aten.roll.default")
def _moved(call: Call) -> Rule | None:
    """Dimensions along which elements move stay whole."""
    touched = _ints(call, 1 if "flip" in call.target else 2, "dims")
    return _within(call, touched) if touched else None


def _within(call: Call, touched: Iterable[int], *, linear: bool = True) -> Rule:
    """The dimensions of the first operand that are not `touched` are independent."""
    names, shape = Names(), call.shape(0)
    inside = {d % len(shape) for d in touched if shape}
    x = tuple([WHOLE if i in inside else names.fresh(size) for i, size in enumerate(shape)])
    groups = linear_in(call, {0}) if linear else ()
    return Rule(names.items, (x,), (x,), groups)


@DEFAULT.computed("aten.pad.default aten.constant_pad_nd.default")
def _pad(call: Call) -> Rule:
    """Dimensions that are padded stay whole; filling in anything but zeros is not linear."""
    rank, given = len(call.shape(0)), _ints(call, 1, "pad")
    touched = [rank - 1 - i // 2 for i, amount in enumerate(given) if amount]
    return _within(call, touched, linear=_pads_zero(call))


def _pads_zero(call: Call) -> bool:
    if call.target == "aten.constant_pad_nd.default":
        return not call.arg(2, "value", 0)
    return call.arg(2, "mode", "constant") != "constant" or not call.arg(3, "value", 0)


@DEFAULT.computed("aten.tril.default aten.triu.default")
def _triangle(call: Call) -> Rule:
    return _within(call, (-2, -1))


@DEFAULT.computed("aten.diff.default")
def _diff(call: Call) -> Rule | None:
    """Neighbours along one dimension are subtracted; the others are independent."""
    return _within(call, (dim_of(call, 2, -1),)) if len(call.operands) == 1 else None


@DEFAULT.computed("aten.unfold.default")
def _unfold(call: Call) -> Rule:
    """Windows along one dimension, which stays whole, laid out in a new last one."""
    names, dim = Names(), dim_of(call, 1)
    x = tuple([WHOLE if i == dim else names.fresh(n) for i, n in enumerate(call.shape(0))])
    return _rule(names, x, (*x, WHOLE))


@DEFAULT.computed("aten.diagonal.default aten.diag_embed.default")
def _diagonal(call: Call) -> Rule:
    """The two dimensions of the diagonal, and the one that is it, stay whole."""
    names = Names()
    embed = "embed" in call.target
    rank = len(call.out if embed else call.shape(0))
    dims = [
        call.int_arg(2, "dim1", -2 if embed else 0),
        call.int_arg(3, "dim2", -1 if embed else 1),
    ]
    square = {d % rank for d in dims}
    lead = call.shape(0)[:-1] if embed else call.out[:-1]
    rest = names.fresh_dims(lead)
    line, moved = (*rest, WHOLE), iter(rest)
    matrix = tuple([WHOLE if d in square else next(moved) for d in range(rank)])
    return _rule(names, *((line, matrix) if embed else (matrix, line)), family="pointwise")


@DEFAULT.computed("aten.view_as_real.default aten.view_as_complex.default")
def _complex_view(call: Call) -> Rule:
    """The pair of parts is a last dimension, which stays whole."""
    names = Names()
    z = names.fresh_dims(call.out[:-1] if "real" in call.target else call.out)
    parts = (*z, WHOLE)
    return _rule(names, *((z, parts) if "real" in call.target else (parts, z)))


@DEFAULT.computed("aten.pixel_shuffle.default aten.pixel_unshuffle.default")
def _pixel_shuffle(call: Call) -> Rule:
    """Channels `(c r r)` become space `(h r) (w r)`, or come back from it."""
    names, fine = Names(), call.out if "_shuffle" in call.target else call.shape(0)
    coarse = call.shape(0) if "_shuffle" in call.target else call.out
    lead, (c, h, w) = names.fresh_dims(fine[:-3]), names.fresh_dims((fine[-3], *coarse[-2:]))
    ratio = names.fixed(fine[-1] // coarse[-1])
    square = names.fixed(coarse[-3] // fine[-3])
    big, small = (*lead, c, h + ratio, w + ratio), (*lead, c + square, h, w)
    return _rule(names, *((small, big) if "_shuffle" in call.target else (big, small)))


@DEFAULT.computed("aten.im2col.default")
def _im2col(call: Call) -> Rule:
    """Patches `[b, (c k), places]` of images `[b, c, h, w]`."""
    names, shape = Names(), call.shape(0)
    lead, c = names.fresh_dims(shape[:-3]), names.fresh(shape[-3])
    patches = names.fixed(call.out[-2] // shape[-3])
    return _rule(names, (*lead, c, WHOLE, WHOLE), (*lead, c + patches, WHOLE), family="gather")


@DEFAULT.computed("aten.meshgrid.default aten.meshgrid.indexing")
def _meshgrid(call: Call) -> Rule | None:
    """Each vector is one dimension of every result; "xy" swaps the first two."""
    names = Names()
    shapes = [meta.shape for meta in call.operands]
    if any(len(shape) != 1 for shape in shapes):
        return None
    x = names.fresh_dims(shape[0] for shape in shapes)
    y = list(x)
    if call.kwargs.get("indexing") == "xy" and len(y) > 1:
        y[0], y[1] = y[1], y[0]
    operands = tuple((dim,) for dim in x)
    return Rule(names.items, operands, (tuple(y),) * len(call.results), ())
