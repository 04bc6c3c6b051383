"""Find an operator's rule by running it: what may be split, what is summed, and where it is linear.

A factor is a set of operand dimensions that are cut together. It is tried on 2 and 3 ranks: the operator
runs on the slices, and what comes out must be the whole result cut in a dimension, or shares that sum to
it; gradients likewise. Everything is run in float64, on random numbers and on adversarial whole ones (ties,
zeros, large and small), for the example's sizes and for others, odd ones among them. A factor that fails
once is not one. This is evidence, not proof: an operator that looks at rare values alone can hide.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import RuleError

RANKS = (2, 3)
TOLERANCE = 1e-9
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MOST = 4096
"""More sets of dimensions than this are not tried."""
Cut = tuple[int | None, ...]
"""For each operand or result, the dimension that is cut; None for none."""
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Factor:
    """Dimensions that are cut together: of operands, and of results (None: summed over)."""

    operands: Cut
    results: Cut

    @property
    def dims(self) -> frozenset[tuple[int, int]]:
        """The (operand, dimension) pairs."""
        return frozenset((i, dim) for i, dim in enumerate(self.operands) if dim is not None)


class Runner:
    """An operator with its example: it can be run on other tensors, of other sizes."""

    def __init__(self, op: Any, args: Sequence[Any]) -> None:
        self.op, self.args = op, tuple(args)
        self.names = [argument.name for argument in op._schema.arguments]  # noqa: SLF001
        self.places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        self.examples: list[Tensor] = [args[i] for i in self.places]
        self.shapes: Shapes = tuple(tuple(t.shape) for t in self.examples)

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results on these tensors."""
        given = list(self.args)
        for place, tensor in zip(self.places, tensors, strict=True):
            given[place] = tensor
        made = self.op(*given)
        made = made if isinstance(made, (tuple, list)) else (made,)
        if not all(isinstance(result, Tensor) for result in made):
            raise RuleError("Only operators that give tensors have a rule.", str(self.op))
        return tuple(made)

    def draws(self, shapes: Shapes, most: int = 99) -> Iterator[list[Tensor]]:
        """Operands to try: random numbers of several sizes, then adversarial whole numbers.

        Those of a million, where a clamp shows, are for linearity: other sums of them round otherwise.
        """
        generator = torch.Generator().manual_seed(0)

        def normal(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def whole(low: int, high: int) -> Callable[[tuple[int, ...]], Tensor]:
            return lambda shape: torch.randint(low, high, shape, generator=generator).double()

        scaled = [lambda shape, by=by: by * normal(shape) for by in (1.0, 1e-3, 30.0)]
        for draw in (*scaled, whole(-2, 3), whole(-9, 10), whole(-most, most + 1)):
            yield [
                draw(shape) if example.is_floating_point() else _like(example, shape, generator)
                for example, shape in zip(self.examples, shapes, strict=True)
            ]


def _like(example: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Whole numbers or truth values drawn from those of the example."""
    flat = example.reshape(-1)
    if not len(flat):
        return example.new_zeros(shape)
    return flat[torch.randint(len(flat), shape, generator=generator)]


def discover(op: Any, example: Sequence[Any]) -> str:
    """Find the rule of an operator by running it, and print it as a line to paste.

    Args:
        op: an operator of `torch.ops`, or its name, "namespace::name".
        example: positional arguments, as the operator takes them; tensors first. Give each dimension
            a size of its own, of at least 3: dimensions of size 1 are left whole.

    Returns:
        the line: `autoshard.rules.register("my::op", "x[a, b] w[c, b] -> y[a, c]", linear="x|w")`.

    Raises:
        RuleError: the operator cannot be run so, draws at random, writes to its operands, or takes
            tensors where a rule cannot name them.
    """
    overload = _overload(op)
    runner = _checked(overload, example)
    factors = _factors(runner)
    line = _line(overload, runner, factors, _linear(runner))
    print(line)  # noqa: T201
    return line


def _overload(op: Any) -> Any:
    """The operator itself, from whatever names it."""
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        try:
            op = getattr(getattr(torch.ops, namespace), name.partition(".")[0])
            return getattr(op, name.partition(".")[2] or "default")
        except AttributeError:
            raise RuleError(
                f"There is no operator '{op}'.",
                fix="Write namespace::name, or namespace::name.overload.",
            ) from None
    op = getattr(op, "_opoverload", op)  # of torch.library.custom_op
    return op.default if hasattr(op, "overloads") else op  # a packet of overloads


def _checked(op: Any, example: Sequence[Any]) -> Runner:
    """The operator with its example, where a rule could be found for it."""
    if op._schema.is_mutable:  # noqa: SLF001
        raise RuleError(f"{op} writes to its operands.", fix="Register what gives a new tensor.")
    wide = [_wide(arg) for arg in example]
    if any(
        isinstance(arg, (tuple, list)) and any(isinstance(a, Tensor) for a in arg) for arg in wide
    ):
        raise RuleError(f"{op} takes a list of tensors.", fix="A rule names each tensor.")
    last = max((i for i, arg in enumerate(wide) if isinstance(arg, Tensor)), default=-1)
    if last < 0 or not all(arg is None or isinstance(arg, Tensor) for arg in wide[:last]):
        raise RuleError(
            f"{op} takes tensors after other arguments.",
            fix="A rule names tensors that come first.",
        )
    runner = Runner(op, wide)
    try:
        first, second = runner.run(runner.examples), runner.run(runner.examples)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise RuleError(f"{op} does not run on the example: {error}") from error
    if not all(map(_same, first, second)):
        raise RuleError(f"{op} gives other results each time.", fix="A rule cannot cover it.")
    return runner


def _wide(arg: Any) -> Any:
    return arg.detach().double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg


# --- factors ------------------------------------------------------------------------------------


def _factors(runner: Runner) -> list[Factor]:
    """The factors of the operator: no two share a dimension."""
    found: list[Factor] = []
    for factor in _hypotheses(runner):
        taken = {dim for known in found for dim in known.dims}
        cut = {(i, d) for known in found for i, d in enumerate(known.results) if d is not None}
        ours = {(i, d) for i, d in enumerate(factor.results) if d is not None}
        if not (taken & factor.dims or cut & ours) and _holds(runner, factor):
            found.append(factor)
    return found


def _hypotheses(runner: Runner) -> Iterator[Factor]:
    """Sets of operand dimensions of one size, the smallest first, with what may become of the results."""
    results = runner.run(runner.examples)
    sizes = sorted({n for shape in runner.shapes for n in shape if n > 1}, reverse=True)
    for n in sizes:
        options = [[None, *_of_size(shape, n)] for shape in runner.shapes]
        after = [[*_of_size(tuple(r.shape), n), None] for r in results]
        cuts = list(itertools.islice(itertools.product(*options), _MOST))
        cuts.sort(key=lambda cut: sum(dim is not None for dim in cut))
        for cut in cuts[1:]:
            yield from (Factor(cut, made) for made in itertools.product(*after))


def _of_size(shape: tuple[int, ...], n: int) -> list[int | None]:
    return [dim for dim, size in enumerate(shape) if size == n]


def _holds(runner: Runner, factor: Factor) -> bool:
    """Whether a factor holds for every draw, size and number of ranks, and in backward."""
    results = runner.run(runner.examples)
    if any(
        dim is None and not result.is_floating_point()
        for dim, result in zip(factor.results, results, strict=True)
    ):
        return False
    size = next(runner.shapes[i][dim] for i, dim in sorted(factor.dims))
    tried = [n for n in (size, 7, 4, 2 * size + 1) if n >= 2]
    return all(_holds_at(runner, factor, n, required=n == size) for n in dict.fromkeys(tried))


def _holds_at(runner: Runner, factor: Factor, size: int, *, required: bool) -> bool:
    """Whether a factor of this size holds; what the operator does not run on says nothing."""
    shapes = tuple(
        tuple(size if (i, dim) in factor.dims else n for dim, n in enumerate(shape))
        for i, shape in enumerate(runner.shapes)
    )
    for tensors in runner.draws(shapes):
        try:
            whole = runner.run(tensors)
        except (RuntimeError, IndexError, ValueError):
            return not required
        for ranks in RANKS:
            if size >= ranks and not _agrees(runner, factor, tensors, whole, ranks):
                return False
    return True


def _agrees(
    runner: Runner, factor: Factor, tensors: list[Tensor], whole: tuple[Tensor, ...], ranks: int
) -> bool:
    """Whether the ranks' results, and the gradients of what they were given, are parts of the whole's."""
    try:
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
        parts = [_cut(leaves, factor.operands, ranks, rank) for rank in range(ranks)]
        made = [runner.run(part) for part in parts]
        joined = [
            _joined([results[i] for results in made], dim) for i, dim in enumerate(factor.results)
        ]
        if not all(map(_same, joined, whole)):
            return False
        return _same_gradients(runner, leaves, joined)
    except (RuntimeError, IndexError, ValueError):
        return False


def _cut(tensors: Sequence[Tensor], cut: Cut, ranks: int, rank: int) -> list[Tensor]:
    """A rank's slices, as `torch.chunk` would have them if it gave every rank one."""
    return [
        t if dim is None else torch.tensor_split(t, ranks, dim)[rank].contiguous()
        for t, dim in zip(tensors, cut, strict=True)
    ]


def _joined(parts: list[Tensor], dim: int | None) -> Tensor:
    if dim is not None:
        return torch.cat(parts, dim)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _same_gradients(runner: Runner, leaves: list[Tensor], joined: list[Tensor]) -> bool:
    """Whether backward through the slices gives what backward through the whole gives."""
    again = [t.detach().requires_grad_() if t.is_floating_point() else t for t in leaves]
    whole = runner.run(again)
    pairs = [
        (a, b)
        for a, b in zip(joined, whole, strict=True)
        if b.requires_grad and b.is_floating_point()
    ]
    if not pairs:
        return not any(part.requires_grad for part in joined)
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(b.shape, generator=generator, dtype=b.dtype) for _, b in pairs]
    found = [
        torch.autograd.grad(
            outputs,
            [t for t in given if t.requires_grad],
            seeds,
            allow_unused=True,
            retain_graph=True,
        )
        for outputs, given in (([a for a, _ in pairs], leaves), ([b for _, b in pairs], again))
    ]
    zero = torch.zeros((), dtype=torch.float64)
    filled = [[zero if gradient is None else gradient for gradient in given] for given in found]
    size = max(map(_size, filled[1]))
    return all(_same(a, b, size) for a, b in zip(*filled, strict=True))


def _size(tensor: Tensor) -> float:
    """The greatest finite absolute value of a tensor."""
    finite = tensor[tensor.isfinite()] if tensor.ndim else tensor
    return float(finite.abs().max()) if finite.numel() else 0.0


def _same(one: Tensor, other: Tensor, size: float = 0.0) -> bool:
    """Whether two tensors are equal, but for the rounding of numbers as large as `size` or themselves."""
    if one.dtype != other.dtype or (one.shape != other.shape and one.numel() and other.numel() > 1):
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    bound = TOLERANCE * max(1e-12, size, _size(other))
    return torch.allclose(one, other.expand_as(one), rtol=TOLERANCE, atol=bound, equal_nan=True)


# --- linearity ----------------------------------------------------------------------------------


def _linear(runner: Runner) -> list[tuple[int, ...]]:
    """The sets of operands in which the operator is linear: single ones, else larger ones."""
    floats = [i for i, t in enumerate(runner.examples) if t.is_floating_point()]
    found: list[tuple[int, ...]] = []
    for count in range(1, len(floats) + 1):
        for group in itertools.combinations(floats, count):
            if not any(set(known) & set(group) for known in found) and _is_linear(runner, group):
                found.append(group)
    return found


def _is_linear(runner: Runner, group: tuple[int, ...]) -> bool:
    """Whether the operator maps sums of multiples to sums of multiples, the other operands held fixed."""
    draws = list(runner.draws(runner.shapes, 10**6))
    for first, second in itertools.permutations(draws, 2):
        both = [
            2 * a + b if i in group else a
            for i, (a, b) in enumerate(zip(first, second, strict=True))
        ]
        mixed = [b if i in group else a for i, (a, b) in enumerate(zip(first, second, strict=True))]
        try:
            f, g, h = (runner.run(given) for given in (first, mixed, both))
        except (RuntimeError, IndexError, ValueError):
            return False
        for a, b, c in zip(f, g, h, strict=True):
            if not (a.is_floating_point() and bool(torch.stack([a, b, c]).isfinite().all())):
                return False
            size = max(float(t.abs().max()) if t.numel() else 0.0 for t in (a, b, c))
            if not torch.allclose(2 * a + b, c, rtol=0.0, atol=TOLERANCE * size):
                return False
    return True


# --- the line -----------------------------------------------------------------------------------


def _line(op: Any, runner: Runner, factors: list[Factor], linear: list[tuple[int, ...]]) -> str:
    """The rule as a line of code."""
    letters: dict[Factor, str] = {}
    tensors, number = [], 0
    for place in range(runner.places[-1] + 1):
        if place not in runner.places:
            tensors.append(f"{runner.names[place]}?[]")
            continue
        dims = []
        for dim in range(len(runner.shapes[number])):
            factor = next((f for f in factors if (number, dim) in f.dims), None)
            dims.append(letters.setdefault(factor, _LETTERS[len(letters)]) if factor else "·")
        tensors.append(f"{runner.names[place]}[{', '.join(dims)}]")
        number += 1
    results = runner.run(runner.examples)
    made = []
    for i, result in enumerate(results):
        at = {f.results[i]: f for f in factors}
        dims = [letters[at[dim]] if dim in at else "·" for dim in range(result.ndim)]
        made.append(f"{'y' if len(results) == 1 else f'y{i}'}[{', '.join(dims)}]")
    name = op.name() if op._overloadname != "default" else op.name().removesuffix(".default")  # noqa: SLF001
    groups = "|".join("+".join(runner.names[runner.places[i]] for i in group) for group in linear)
    tail = f', linear="{groups}"' if groups else ""
    return f'autoshard.rules.register("{name}", "{" ".join(tensors)} -> {" ".join(made)}"{tail})'
