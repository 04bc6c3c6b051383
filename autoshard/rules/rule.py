"""A rule: the factors of an operator's dimensions, from which every strategy follows.

An operator's dimensions are named as an einsum names them. A named factor may be split over ranks; a
dimension written `·` may not. What splitting a factor means is said once, here, for all operators:

- an operand that has the factor is Shard on that dimension; a float operand without it is Replicate;
- a result that has it is Shard; a result without it is Partial, for the operator sums over it.

A factor that is reduced in any other way than by a sum must be written `·`, or be given a `Special`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from autoshard.errors import RuleError
from autoshard.graph import Op, OpGraph, TensorMeta, fill_slots

Dim = tuple[str, ...]
"""The factors of one dimension, outer to inner; () is a dimension that must stay whole."""
Dims = tuple[Dim, ...]

Place = tuple[bool, int, int, int]
"""Where a factor is: (is a result, which, dimension, product of the factors outside it)."""

WHOLE: Dim = ()
FIXED = "!"
"""Factors whose names begin so are never split."""


@dataclass(frozen=True, slots=True)
class Inner:
    """A collective inside a lowering, as prices and reports see it.

    Attributes:
        kind: "all_reduce", "all_gather" or "reduce_scatter".
        phase: "forward" or "backward".
        shape, dtype: of the whole tensor that it moves.
        reason: why it runs.
        per_rank: whether `shape` is what each rank has a part of its own of, one after another.
    """

    kind: str
    phase: str
    shape: tuple[int, ...]
    dtype: str
    reason: str
    per_rank: bool = False


@dataclass(frozen=True, slots=True)
class Special:
    """A strategy that is more than the operator on slices: splitting `factor` runs `lowering` instead.

    Attributes:
        factor: the factor that is split.
        lowering: name of the program in `autoshard.runtime.lowerings`; "" runs the operator itself.
        results: a state for each result as text ("I", "P"), where it is not the usual one; "" is.
        inner: the collectives that the lowering runs, or a function from the number of ranks to them.
    """

    factor: str
    lowering: str
    results: tuple[str, ...] = ()
    inner: tuple[Inner, ...] | Callable[[int], tuple[Inner, ...]] = ()

    def on(self, ranks: int) -> tuple[Inner, ...]:
        """The collectives that the lowering runs on so many ranks."""
        return self.inner(ranks) if callable(self.inner) else self.inner


@dataclass(frozen=True)
class Rule:
    """A rule bound to the shapes of one call.

    Attributes:
        sizes: each factor and its size.
        operands: dims of each operand, in the order of the operator's operands.
        results: dims of each result; None for one that is no tensor.
        linear: sets of operands in which the operator is linear (jointly, the others held fixed).
        specials: strategies that are more than the operator on slices.
        family: how it is priced: "view" (free), "pointwise", "contraction", "attention",
            "reduction", "gather", "norm" or "loss".
        contiguous: factors that cannot be cut in blocks, only contiguously.
        locked: operands that must be used as they are, for the operator writes to them.
        even: factors that can only be cut evenly, for an argument holds the size of a slice.
        joint: factors named beside the dims, with their places: whole dimensions made of other factors, as
            query heads are of (kv g), and whole dimensions of different lengths, as space is.
        lengths: for factors whose dimension is of another length in some place: those lengths.
        apart: factors that are a different dimension of the model in each place: the rows that are looked
            up, and the places that they are looked up for; experts, and the rows that are theirs.
        instead: (factor, other) pairs: the factor is cut where the other cannot be, and only there.
        noise: whether its result is the rounding error of its operands, as a norm of single elements
            is: only the whole program, run as it would unsharded, has the same.
    """

    sizes: tuple[tuple[str, int], ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims | None, ...]
    linear: tuple[frozenset[int], ...] = ()
    specials: tuple[Special, ...] = ()
    family: str = "pointwise"
    contiguous: frozenset[str] = frozenset()
    locked: frozenset[int] = frozenset()
    even: frozenset[str] = frozenset()
    joint: tuple[tuple[str, tuple[Place, ...]], ...] = ()
    lengths: tuple[tuple[str, tuple[int, ...]], ...] = ()
    instead: tuple[tuple[str, str], ...] = ()
    apart: frozenset[str] = frozenset()
    noise: bool = False

    def __post_init__(self) -> None:
        """A factor of no dimension, split, would make whole results of shares: refuse it."""
        used = {f for dims in (*self.operands, *self.results) for dim in dims or () for f in dim}
        used |= {name for name, _ in self.joint}
        unused = [name for name, _ in self.sizes if name not in used]
        if unused:
            raise RuleError(f"Factor '{unused[0]}' is in no dimension.", str(self))

    @cached_property
    def size(self) -> dict[str, int]:
        """The size of each factor."""
        return dict(self.sizes)

    @cached_property
    def places(self) -> dict[str, tuple[Place, ...]]:
        """For each factor, where it is."""
        found: dict[str, list[Place]] = {name: [] for name, _ in self.sizes}
        for is_result, tensors in ((False, self.operands), (True, self.results)):
            for which, dims in enumerate(tensors):
                for dim, factors in enumerate(dims or ()):
                    outer = 1
                    for factor in factors:
                        found[factor].append((is_result, which, dim, outer))
                        outer *= self.size[factor]
        return {name: tuple(places) for name, places in found.items()} | dict(self.joint)

    @cached_property
    def uneven(self) -> frozenset[str]:
        """The factors that may be cut in slices of different sizes: each a whole dimension wherever it is."""
        inside = {
            factor
            for dims in (*self.operands, *(d for d in self.results if d))
            for dim in dims
            if len(dim) > 1
            for factor in dim
        }
        return frozenset(self.size) - inside - self.even

    def __str__(self) -> str:
        def tensor(dims: Dims | None) -> str:
            if dims is None:
                return "-"
            return f"[{', '.join(_dim_text(dim) for dim in dims)}]"

        return f"{' '.join(map(tensor, self.operands))} -> {' '.join(map(tensor, self.results))}"


def _dim_text(dim: Dim) -> str:
    if not dim:
        return "·"
    return dim[0] if len(dim) == 1 else f"({' '.join(dim)})"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of a `Call`: which operand it is, and its meta."""

    position: int
    meta: TensorMeta


@dataclass(frozen=True)
class Call:
    """One call of an operator, as a rule sees it: arguments with tensors as `Operand`s."""

    target: str
    args: tuple
    kwargs: dict[str, object]
    operands: tuple[TensorMeta, ...]
    results: tuple[TensorMeta | None, ...]

    @staticmethod
    def of(op: Op, graph: OpGraph) -> Call:
        """The call that `op` of `graph` makes."""
        metas = graph.operand_metas(op)

        def operand(position: int) -> Operand:
            return Operand(position, metas[position])

        args = fill_slots(op.args, operand)
        kwargs = {key: fill_slots(value, operand) for key, value in op.kwargs}
        assert isinstance(args, tuple)
        return Call(op.target, args, kwargs, metas, op.results)

    def arg(self, index: int, name: str = "", default: object = None) -> object:
        """The argument at `index`, or by `name`, or `default` where the call leaves it out."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)

    def int_arg(self, index: int, name: str, default: int) -> int:
        """An argument that is a whole number."""
        value = self.arg(index, name, default)
        return value if isinstance(value, int) else default

    def shape(self, index: int) -> tuple[int, ...]:
        """The shape of operand `index`."""
        return self.operands[index].shape

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the first result."""
        assert self.results[0] is not None
        return self.results[0].shape


class Names:
    """Fresh factor names for one rule, with the sizes they were given."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def fresh(self, size: int, stem: str = "f") -> Dim:
        """A dimension of one new factor; a dimension of size 1, or 0, has nothing to split."""
        if size <= 1:
            return WHOLE
        name = f"{stem}{len(self.sizes)}"
        self.sizes[name] = size
        return (name,)

    def fresh_dims(self, shape: Iterable[int], stem: str = "f") -> Dims:
        """New factors for each dimension of `shape`."""
        return tuple([self.fresh(size, stem) for size in shape])

    def fixed(self, size: int) -> Dim:
        """A factor that may not be split, but inside which others may: the 3 of a fused QKV."""
        if size <= 1:
            return WHOLE
        name = f"{FIXED}{len(self.sizes)}"
        self.sizes[name] = size
        return (name,)

    @property
    def items(self) -> tuple[tuple[str, int], ...]:
        """The factors and their sizes, in the order they were made."""
        return tuple(self.sizes.items())


def whole(shape: tuple[int, ...]) -> Dims:
    """Dims of a tensor that must not be split."""
    return (WHOLE,) * len(shape)


FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
COMPLEX = frozenset({"complex32", "complex64", "complex128"})


def statistic(
    meta: TensorMeta, shape: tuple[int, ...], *forward: str, backward: tuple[str, ...] = ()
) -> tuple[Inner, ...]:
    """All-reduces of statistics of `meta`, of this shape: why each runs, forward and backward."""
    dtype = "float32" if meta.dtype in ("float16", "bfloat16") else meta.dtype
    found = [Inner("all_reduce", "forward", shape, dtype, reason) for reason in forward]
    if meta.grad:
        found += [Inner("all_reduce", "backward", shape, dtype, reason) for reason in backward]
    return tuple(found)
