"""Operators that look elements up, and that write them to looked-up places.

Where the dimension that is looked along is split, each rank finds what is in its own slice and zeros
for the rest: a share. So do embeddings with their vocabulary split.
"""

from __future__ import annotations

from autoshard.rules.pointwise import aligned, linear_in
from autoshard.rules.registry import DEFAULT
from autoshard.rules.rule import (
    FLOATS,
    WHOLE,
    Call,
    Dims,
    Inner,
    Names,
    Operand,
    Rule,
    Special,
    whole,
)
from autoshard.rules.view import dim_of

FIRST = (frozenset({0}),)


@DEFAULT.computed("aten.embedding.default")
def _embedding(call: Call) -> Rule | None:
    """`w[v, d] ids[*b] -> y[*b, d]`: with v split, ids that are not a rank's own give zeros, a share.

    Gradients scaled by how often an id occurs need every id, and all of them at their own row.
    """
    if call.arg(4, "sparse", False):
        return None
    names, (rows, width) = Names(), call.shape(0)
    counted = bool(call.arg(3, "scale_grad_by_freq", False))
    v = WHOLE if counted else names.fresh(rows, "v")
    d = names.fresh(width, "d")
    ids = whole(call.shape(1)) if counted else names.fresh_dims(call.shape(1), "b")
    specials = tuple(Special(f, "vocab_embedding") for f in v)
    return Rule(
        names.items,
        ((v, d), ids),
        ((*ids, d),),
        FIRST,
        specials,
        "gather",
        contiguous=frozenset(v),
    )


def _lookup(call: Call, names: Names, dim: int, ids: Dims, y: Dims) -> Rule:
    """`x` is looked up along `dim`, with `ids` in the place of that dimension."""
    split = call.operands[0].dtype != "bool"
    rows = names.fresh(call.shape(0)[dim], "v") if split else WHOLE
    x = (*y[:dim], rows, *y[dim + len(ids) :])
    specials = tuple(Special(f, "split_lookup") for f in rows)
    joint = lengths = ()
    if len(ids) == 1 and ids[0] and rows and dim == 0 and call.operands[0].dtype in FLOATS:
        names.sizes["both"] = call.out[0]
        joint = (("both", ((False, 0, 0, 1), (True, 0, 0, 1))),)
        lengths = (("both", (call.shape(0)[0],)),)
        specials += (Special("both", "exchanged_lookup", (), _exchanged(call)),)
    also = frozenset(name for name, _ in joint)
    return Rule(
        names.items,
        (x, ids),
        (y,),
        FIRST,
        specials,
        "gather",
        contiguous=frozenset(rows) | also,
        joint=joint,
        lengths=lengths,
        apart=also,
    )


def _exchanged(call: Call) -> tuple[Inner, ...]:
    """Rows from the ranks that have them to those that look them up, and their gradients back."""
    why = "rows are split, and so are the places that look them up"
    dtype = call.operands[0].dtype
    found = (Inner("all_to_all", "forward", call.out, dtype, f"{why}; the rows travel"),)
    if call.operands[0].grad:
        back = f"{why}; the rows' gradients travel"
        found += (Inner("all_to_all", "backward", call.out, dtype, back),)
    return found


@DEFAULT.computed("aten.index_select.default")
def _index_select(call: Call) -> Rule | None:
    if len(call.shape(1)) != 1 or not call.shape(0):
        return None
    names, dim = Names(), dim_of(call, 1)
    y = names.fresh_dims(call.out)
    return _lookup(call, names, dim, (y[dim],), y)


@DEFAULT.computed("aten.gather.default")
def _gather(call: Call) -> Rule | None:
    """Dimensions where index and source agree are independent, and so are places to look up."""
    if not call.shape(0):
        return None
    names, shape, dim = Names(), call.shape(0), dim_of(call, 1)
    pairs = enumerate(zip(shape, call.out, strict=True))
    y = [names.fresh(b) if a == b or i == dim else WHOLE for i, (a, b) in pairs]
    x = list(y)
    x[dim] = names.fresh(shape[dim], "v") if call.operands[0].dtype != "bool" else WHOLE
    specials = tuple(Special(f, "split_gather") for f in x[dim])
    return Rule(
        names.items,
        (tuple(x), tuple(y)),
        (tuple(y),),
        FIRST,
        specials,
        "gather",
        contiguous=frozenset(x[dim]),
    )


def _indices(call: Call) -> tuple[list[int], tuple[int, ...], int] | None:
    """Of an index with tensors: the dimensions that have one, the tensors' common shape, its place."""
    given = call.arg(1, "indices")
    assert isinstance(given, tuple)
    at = [i for i, item in enumerate(given) if isinstance(item, Operand)]
    tensors = [item.meta for item in given if isinstance(item, Operand)]
    if not at or any(meta.dtype in ("bool", "uint8") for meta in tensors):
        return None
    rank = max(len(meta.shape) for meta in tensors)
    shapes = [(1,) * (rank - len(meta.shape)) + meta.shape for meta in tensors]
    shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    together = at == list(range(at[0], at[-1] + 1))
    return at, shape, at[0] if together else 0


@DEFAULT.computed("aten.index.Tensor")
def _index(call: Call) -> Rule | None:
    """Dimensions without an index are independent, and so are places to look up."""
    found = _indices(call)
    if found is None:
        return None
    at, shape, place = found
    names = Names()
    y = names.fresh_dims(call.out)
    ids = y[place : place + len(shape)]
    if len(at) == 1 and len(call.operands) == 2:
        return _lookup(call, names, at[0], ids, y)
    rest = iter((*y[:place], *y[place + len(shape) :]))
    x = tuple([WHOLE if i in at else next(rest) for i in range(len(call.shape(0)))])
    tensors = [aligned(meta.shape, shape, ids) for meta in call.operands[1:]]
    return Rule(names.items, (x, *tensors), (y,), FIRST, family="gather")


@DEFAULT.computed("aten.index_put.default")
def _index_put(call: Call) -> Rule | None:
    """Dimensions without an index are independent; every rank writes to all indexed places.

    A mask of the leading dimensions with one value for all is a `where`.
    """
    masks = call.arg(1, "indices")
    assert isinstance(masks, tuple)
    first = masks[0]
    names, shape = Names(), call.out
    if isinstance(first, Operand) and first.meta.dtype == "bool" and len(masks) == 1:
        if call.operands[-1].numel != 1:
            return None
        x = names.fresh_dims(shape)
        value = whole(call.operands[-1].shape)
        return Rule(
            names.items, (x, x[: len(first.meta.shape)], value), (x,), linear_in(call, {0, 2})
        )
    found = _indices(call)
    if found is None:
        return None
    at, indexed, place = found
    x = tuple([WHOLE if i in at else names.fresh(n) for i, n in enumerate(shape)])
    rest = [i for i in range(len(shape)) if i not in at]
    before = [i for i in rest if i < place] if place else []
    after = [i for i in rest if i not in before]
    lead, tail = tuple(x[i] for i in before), tuple(x[i] for i in after)
    whole_values = (*(shape[i] for i in before), *indexed, *(shape[i] for i in after))
    values = aligned(call.operands[-1].shape, whole_values, (*lead, *whole(indexed), *tail))
    indices = [whole(meta.shape) for meta in call.operands[1:-1]]
    last = len(call.operands) - 1
    return Rule(
        names.items, (x, *indices, values), (x,), linear_in(call, {0, last}), family="gather"
    )


@DEFAULT.computed(
    "aten.scatter.src aten.scatter.value aten.scatter_add.default aten.scatter_reduce.two"
)
def _scatter(call: Call) -> Rule:
    """Dimensions where all agree are independent, but for the one that is written along."""
    names, dim = Names(), dim_of(call, 1)
    sizes = [
        {meta.shape[i] if meta.shape else 1 for meta in call.operands} for i in range(len(call.out))
    ]
    x = tuple(
        [
            names.fresh(call.out[i]) if len(found) == 1 and i != dim else WHOLE
            for i, found in enumerate(sizes)
        ]
    )
    groups: list[set[int]] = []
    if call.target in ("aten.scatter.src", "aten.scatter_add.default"):
        groups = [{0, 2}]
    elif call.target == "aten.scatter.value" and call.arg(3, "value") == 0:
        groups = [{0}]
    operands = tuple(x if meta.shape else () for meta in call.operands)
    return Rule(names.items, operands, (x,), linear_in(call, *groups), family="gather")


@DEFAULT.computed(
    "aten.index_add.default aten.index_copy.default aten.index_fill.int_Scalar aten.index_fill.int_Tensor"
)
def _index_add(call: Call) -> Rule:
    """Slices are written along one dimension; the others are independent."""
    names, dim = Names(), dim_of(call, 1)
    x = tuple([WHOLE if i == dim else names.fresh(n) for i, n in enumerate(call.out)])
    fills = "fill" in call.target
    rest = [whole(call.shape(1))]
    if len(call.operands) == 3:
        rest.append(whole(call.shape(2)) if fills else x)
    zero = "Scalar" in call.target and call.arg(3, "value") == 0
    groups = [{0, 2}] if len(call.operands) == 3 else [{0}] if zero else []
    return Rule(names.items, (x, *rest), (x,), linear_in(call, *groups), family="gather")


@DEFAULT.computed("aten.one_hot.default")
def _one_hot(call: Call) -> Rule:
    names = Names()
    ids = names.fresh_dims(call.shape(0))
    return Rule(names.items, (ids,), ((*ids, WHOLE),), family="gather")
