"""Operators that rearrange: views, permutations, slices, splits, concatenations."""

from __future__ import annotations

from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import WHOLE, Call, Dim, Dims, Names, Rule

FIRST = (frozenset({0}),)


def _rule(names: Names, x: Dims, y: Dims, count: int = 1, family: str = "view") -> Rule:
    return Rule(names.items, (x,), (y,) * count, FIRST, family=family)


def common_factors(names: Names, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[Dims, Dims]:
    """Factor two shapes of equal size into the same factors, outer to inner.

    A dimension is then the product of its factors: `[B, S, 3·H]` against `[B, S, 3, H]` gives
    `[b, s, (t h)]` and `[b, s, t, h]`. Where the sizes do not nest, the dimensions involved stay whole.
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
    "aten.squeeze.dims"
)
def _reshape(call: Call) -> Rule | None:
    if len(call.operands) > 1 or 0 in call.out or isinstance(call.arg(1), str):
        return None
    names = Names()
    old, new = common_factors(names, call.shape(0), call.out)
    return _rule(names, old, new)


@DEFAULT.computed("aten.expand.default aten.broadcast_to.default")
def _expand(call: Call) -> Rule | None:
    """New leading dimensions and stretched ones stay with their copies whole on every rank."""
    if len(call.operands) > 1:
        return None
    names, shape = Names(), call.shape(0)
    skip = len(call.out) - len(shape)
    y = list(names.fresh_dims(call.out))
    x = [y[skip + i] if size == call.out[skip + i] else WHOLE for i, size in enumerate(shape)]
    return _rule(names, tuple(x), tuple(y))


@DEFAULT.computed(
    "aten.permute.default aten.transpose.int aten.t.default aten.movedim.int aten.mT.default "
    "aten.numpy_T.default"
)
def _permute(call: Call) -> Rule | None:
    rank = len(call.shape(0))
    order = list(range(rank))
    if call.target == "aten.permute.default":
        given = call.arg(1, "dims")
        assert isinstance(given, tuple)
        order = [d % rank for d in given]
    elif call.target == "aten.numpy_T.default":
        order.reverse()
    elif call.target == "aten.movedim.int":
        source, target = (
            call.int_arg(1, "source", 0) % rank,
            call.int_arg(2, "destination", 0) % rank,
        )
        order.insert(target, order.pop(source))
    elif rank > 1:
        a, b = (
            (call.int_arg(1, "dim0", 0), call.int_arg(2, "dim1", 1))
            if call.target == "aten.transpose.int"
            else (-2, -1)
        )
        order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    names = Names()
    x = names.fresh_dims(call.shape(0))
    return _rule(names, x, tuple([x[d] for d in order]))


def _dim(call: Call, index: int, default: int = 0, name: str = "dim") -> int:
    return call.int_arg(index, name, default) % max(len(call.shape(0)), 1)


@DEFAULT.computed("aten.slice.Tensor aten.narrow.default")
def _slice(call: Call) -> Rule:
    """The sliced dimension stays whole, unless the slice is all of it."""
    names, dim = Names(), _dim(call, 1)
    x = list(names.fresh_dims(call.shape(0)))
    if call.out[dim] != call.shape(0)[dim]:
        names.sizes = {k: v for k, v in names.sizes.items() if (k,) != x[dim]}
        x[dim] = WHOLE
    return _rule(names, tuple(x), tuple(x))


@DEFAULT.computed("aten.select.int")
def _select(call: Call) -> Rule:
    names, dim = Names(), _dim(call, 1)
    y = names.fresh_dims(call.out)
    return _rule(names, (*y[:dim], WHOLE, *y[dim:]), y)


@DEFAULT.computed("aten.unbind.int")
def _unbind(call: Call) -> Rule:
    names, dim = Names(), _dim(call, 1)
    y = names.fresh_dims(call.out)
    return _rule(names, (*y[:dim], WHOLE, *y[dim:]), y, len(call.results))


@DEFAULT.computed(
    "aten.split.Tensor aten.split_with_sizes.default aten.chunk.default aten.split.sizes"
)
def _split(call: Call) -> Rule:
    """Equal parts are blocks: each is split over the ranks, and so is the whole, in blocks."""
    names, dim = Names(), _dim(call, 2)
    shape = call.shape(0)
    parts = {meta.shape[dim] for meta in call.results if meta}
    y = [WHOLE if i == dim else names.fresh(size) for i, size in enumerate(shape)]
    x = list(y)
    if len(parts) == 1:
        y[dim] = names.fresh(parts.pop())
        x[dim] = (*names.fixed(len(call.results)), *y[dim])
    return _rule(names, tuple(x), tuple(y), len(call.results))


@DEFAULT.computed("aten.cat.default aten.concat.default")
def _cat(call: Call) -> Rule | None:
    """The joined dimension is equal blocks where the parts are equal, and whole elsewhere."""
    names, out = Names(), call.out
    shapes = [meta.shape for meta in call.operands]
    if any(len(shape) != len(out) for shape in shapes):
        return None
    dim = call.int_arg(1, "dim", 0) % len(out)
    y = [WHOLE if i == dim else names.fresh(size) for i, size in enumerate(out)]
    x = list(y)
    if len({shape[dim] for shape in shapes}) == 1:
        x[dim] = names.fresh(shapes[0][dim])
        y[dim] = (*names.fixed(len(shapes)), *x[dim])
    return Rule(
        names.items,
        (tuple(x),) * len(shapes),
        (tuple(y),),
        (frozenset(range(len(shapes))),),
        family="pointwise",
    )


@DEFAULT.computed("aten.stack.default")
def _stack(call: Call) -> Rule:
    names, dim = Names(), call.int_arg(1, "dim", 0) % len(call.out)
    x = names.fresh_dims(call.shape(0))
    y = (*x[:dim], WHOLE, *x[dim:])
    count = len(call.operands)
    return Rule(names.items, (x,) * count, (y,), (frozenset(range(count)),), family="pointwise")


@DEFAULT.computed("aten.repeat.default")
def _repeat(call: Call) -> Rule:
    """Dimensions that are repeated once keep their factor; the others stay whole."""
    names, shape = Names(), call.shape(0)
    skip = len(call.out) - len(shape)
    x = [names.fresh(size) if size == call.out[skip + i] else WHOLE for i, size in enumerate(shape)]
    return _rule(names, tuple(x), (WHOLE,) * skip + tuple(x), family="pointwise")


@DEFAULT.computed(
    "aten.flip.default aten.roll.default aten.pad.default aten.constant_pad_nd.default"
)
def _moved_within(call: Call) -> Rule | None:
    """Dimensions along which elements move, or that are padded, stay whole."""
    names, shape = Names(), call.shape(0)
    touched = _touched(call, len(shape))
    if touched is None:
        return None
    x = tuple([WHOLE if i in touched else names.fresh(size) for i, size in enumerate(shape)])
    fills = "pad" in call.target and not _pads_zero(call)
    return Rule(names.items, (x,), (x,), () if fills else FIRST, family="pointwise")


def _pads_zero(call: Call) -> bool:
    if call.target == "aten.constant_pad_nd.default":
        return not call.arg(2, "value", 0)
    return call.arg(2, "mode", "constant") != "constant" or not call.arg(3, "value", 0)


def _touched(call: Call, rank: int) -> set[int] | None:
    if "pad" in call.target:
        given = call.arg(1, "pad")
        assert isinstance(given, tuple)
        return {rank - 1 - i // 2 for i, amount in enumerate(given) if amount != 0}
    given = call.arg(1 if "flip" in call.target else 2, "dims", ())
    assert isinstance(given, tuple)
    return {d % rank for d in given} or None
