"""Rules written as one line, `x[*b, i] w[o, i] bias?[o] -> y[*b, o]`, read and bound to shapes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoshard.errors import RuleError
from autoshard.rules.rule import WHOLE, Call, Dim, Dims, Operand, Rule, Special

_TENSOR = re.compile(r"\s*([A-Za-z]\w*)(\?)?\[([^\]]*)\]")
_FACTOR = re.compile(r"\*?[A-Za-z]\w*\??|·|_|\.")


@dataclass(frozen=True)
class TensorPattern:
    """One tensor of a template: its name, whether it may be absent, and its dimensions."""

    name: str
    optional: bool
    dims: tuple[str, ...]

    @property
    def star(self) -> int:
        """Position of the `*` dimension, or -1."""
        return next((i for i, dim in enumerate(self.dims) if dim.startswith("*")), -1)


@dataclass(frozen=True)
class Template:
    """A rule's line, parsed; `bind` gives it the shapes of a call.

    Operands are matched to the call's tensor arguments by position in the operator's signature.
    """

    text: str
    operands: tuple[TensorPattern, ...]
    results: tuple[TensorPattern, ...]
    linear: tuple[frozenset[str], ...]
    specials: tuple[Special, ...]
    family: str

    @staticmethod
    def parse(
        text: str,
        *,
        linear: str = "",
        specials: tuple[Special, ...] = (),
        family: str = "contraction",
    ) -> Template:
        """Read a rule's line.

        Raises:
            RuleError: it has no arrow, a tensor cannot be read, or a result has an unknown factor.
        """
        left, arrow, right = text.partition("->")
        if not arrow:
            raise RuleError("A rule needs an arrow.", repr(text), "Write operands -> results.")
        operands, results = _tensors(left, text), _tensors(right, text)
        known = {_stem(dim) for pattern in operands for dim in pattern.dims}
        for pattern in results:
            for dim in pattern.dims:
                if _stem(dim) not in known and _stem(dim):
                    raise RuleError(
                        f"Factor '{dim}' of '{pattern.name}' is in no operand.", repr(text)
                    )
        groups = tuple(frozenset(part.split("+")) for part in linear.split("|") if part)
        names = {pattern.name for pattern in operands}
        for group in groups:
            if not group <= names:
                raise RuleError(f"'{linear}' names operands the rule has not.", repr(text))
        return Template(text, operands, results, groups, specials, family)

    def bind(self, call: Call) -> Rule | None:
        """The rule with this call's shapes; None where the call does not have the rule's form."""
        sizes: dict[str, int] = {}
        dims: list[Dims | None] = [None] * len(call.operands)
        names: dict[str, int] = {}
        for index, pattern in enumerate(self.operands):
            given = call.arg(index, pattern.name)
            if not isinstance(given, Operand):
                if given is None and pattern.optional:
                    continue
                return None
            bound = _match(pattern, given.meta.shape, sizes)
            if bound is None:
                return None
            dims[given.position], names[pattern.name] = bound, given.position
        if any(found is None for found in dims) or len(call.results) != len(self.results):
            return None
        results = [
            _result(p, meta.shape if meta else (), sizes)
            for p, meta in zip(self.results, call.results, strict=True)
        ]
        if any(found is None for found in results):
            return None
        absent = {p.name for p in self.operands} - set(names)
        linear = [frozenset(names[n] for n in g) for g in self.linear if not g & absent]
        return Rule(
            tuple((name, size) for name, size in sizes.items() if size > 1),
            tuple(_drop_ones(found, sizes) for found in dims if found is not None),
            tuple(_drop_ones(found, sizes) for found in results if found is not None),
            tuple(linear),
            tuple(s for s in self.specials if sizes.get(s.factor, 1) > 1),
            self.family,
        )


def _tensors(text: str, rule: str) -> tuple[TensorPattern, ...]:
    found, end = [], 0
    while text[end:].strip():
        match = _TENSOR.match(text, end)
        if not match:
            raise RuleError(
                f"Cannot read '{text[end:].strip()}'.", repr(rule), "Write name[dim, …]."
            )
        dims = tuple(part.strip() for part in match[3].split(",") if part.strip())
        for dim in dims:
            if not _FACTOR.fullmatch(dim):
                raise RuleError(f"'{dim}' is not a factor.", repr(rule))
        if sum(dim.startswith("*") for dim in dims) > 1:
            raise RuleError(f"'{match[1]}' has two * dimensions.", repr(rule))
        found.append(TensorPattern(match[1], bool(match[2]), dims))
        end = match.end()
    return tuple(found)


def _stem(dim: str) -> str:
    return "" if dim in "·_." else dim.strip("*?")


def _match(pattern: TensorPattern, shape: tuple[int, ...], sizes: dict[str, int]) -> Dims | None:
    """Name the dimensions of `shape`; None where they contradict sizes already known."""
    dims = list(pattern.dims)
    star = pattern.star
    if star >= 0:
        stem, count = _stem(dims[star]), len(shape) - len(dims) + 1
        if count < 0:
            return None
        dims[star : star + 1] = [f"{stem}{i}" for i in range(count)]
    while len(dims) > len(shape) and dims[0].endswith("?"):
        dims.pop(0)
    if len(dims) != len(shape):
        return None
    found: list[Dim] = []
    for dim, size in zip(dims, shape, strict=True):
        name = _stem(dim)
        if not name or (dim.endswith("?") and size == 1):
            found.append(WHOLE)
            continue
        if sizes.setdefault(name, size) != size:
            return None
        found.append((name,))
    return tuple(found)


def _result(pattern: TensorPattern, shape: tuple[int, ...], sizes: dict[str, int]) -> Dims | None:
    return _match(pattern, shape, sizes)


def _drop_ones(dims: Dims, sizes: dict[str, int]) -> Dims:
    return tuple(dim if dim and sizes[dim[0]] > 1 else WHOLE for dim in dims)
