"""The captured model as plain data: operators, the tensors between them, and nothing of torch.

An `OpGraph` is a list of `Op`s in the order they run. Everything a later stage may ask of an operator
(shapes, arguments, where it stands in the model) is in the `Op`; the torch objects behind it stay with
`capture`, keyed by the same names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autoshard.errors import CaptureError


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What is known of a tensor before it exists.

    Attributes:
        shape: sizes of the whole tensor.
        dtype: as torch prints it, without "torch.": "bfloat16".
        grad: whether a gradient flows through it. Where none does, Invariant and Replicate are one.
    """

    shape: tuple[int, ...]
    dtype: str
    grad: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{'*' if self.grad else ''}"


@dataclass(frozen=True, slots=True)
class Ref:
    """Result `index` of the operator named `op`."""

    op: str
    index: int = 0

    def __str__(self) -> str:
        return f"%{self.op}" if self.index == 0 else f"%{self.op}.{self.index}"


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor among an operator's arguments: its operand `position`.

    Arguments with slots for tensors are equal for equal calls, whatever tensors they are made on.
    """

    position: int

    def __str__(self) -> str:
        return f"${self.position}"


@dataclass(frozen=True, slots=True)
class Op:
    """One operator of the graph, or one of its leaves.

    Attributes:
        name: unique in the graph.
        kind: "parameter", "buffer", "constant", "input", "call" or "output".
        target: for calls the operator ("aten.linear.default"), for leaves the FQN or input name.
        args, kwargs: arguments as written, nested, with a `Slot` for each tensor.
        operands: the tensors in the slots, in order.
        results: one meta a result; None for a result that is no tensor.
        module: FQN of the module whose forward runs it.
        trace: the user's stack trace, innermost last.
        fqns: for parameters and buffers, all names (more than one where tied).
        pinned: positions of operands that must be taken as they are, for they share memory with a
            tensor that some operator writes to.
        writes: whether it writes to an operand.
    """

    name: str
    kind: str
    target: str
    args: tuple = ()
    kwargs: tuple[tuple[str, object], ...] = ()
    operands: tuple[Ref, ...] = ()
    results: tuple[TensorMeta | None, ...] = ()
    module: str = ""
    trace: str = ""
    fqns: tuple[str, ...] = ()
    pinned: tuple[int, ...] = ()
    writes: bool = False

    @property
    def stored(self) -> bool:
        """Whether it is a parameter, a buffer or a constant: a tensor that outlives a step."""
        return self.kind in ("parameter", "buffer", "constant")

    @property
    def source(self) -> str:
        """The user's source line that led here: `file.py:12, in forward: x = x + 1`."""
        found = re.findall(r'File "([^"<]+)", line (\d+), in (\S+)\n\s*(.*)', self.trace)
        if not found:
            return ""
        path, line, function, code = found[-1]
        return f"{path}:{line}, in {function}: {code}"


@dataclass(frozen=True, slots=True)
class Footprint:
    """What memory one operator takes, with its tensors whole: found by running it on the meta device.

    Attributes:
        keeps_operands, keeps_results: whether autograd keeps each for backward.
        kept_bytes: of what it keeps beside them: masks, statistics.
        aliases: for each result, the operand whose memory it shares; None where it has its own.
        forward_bytes: at most at once while it runs, beside its operands, its results and what is kept.
        gradient_aliases: for each operand, the result whose gradient is its gradient's memory too.
        backward_bytes: as `forward_bytes`, in backward, beside its operands' and results' gradients.
    """

    keeps_operands: tuple[bool, ...] = ()
    keeps_results: tuple[bool, ...] = ()
    kept_bytes: int = 0
    aliases: tuple[int | None, ...] = ()
    forward_bytes: int = 0
    gradient_aliases: tuple[int | None, ...] = ()
    backward_bytes: int = 0


@dataclass(frozen=True)
class OpGraph:
    """A model as operators in the order they run; the last is the output.

    Attributes:
        ops: in topological order.
        model: name of the model's class.
        blocks: FQNs of the modules that have modules of their own.
        footprints: what memory each call takes, by the op's name, where that was found out.
    """

    ops: tuple[Op, ...]
    model: str = ""
    blocks: frozenset[str] = frozenset()
    footprints: Mapping[str, Footprint] = field(default_factory=dict, repr=False, compare=False)
    by_name: dict[str, Op] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {op.name: op for op in self.ops})

    def meta(self, ref: Ref) -> TensorMeta:
        """The tensor `ref` names."""
        found = self.by_name[ref.op].results[ref.index]
        assert found is not None
        return found

    def operand_metas(self, op: Op) -> tuple[TensorMeta, ...]:
        """The metas of an operator's operands, in order."""
        by_name = self.by_name
        return tuple(by_name[ref.op].results[ref.index] for ref in op.operands)  # type: ignore[misc]

    @cached_property
    def consumers(self) -> dict[Ref, tuple[tuple[Op, int], ...]]:
        """For each tensor, the operators that take it and at which operand position."""
        found: dict[Ref, list[tuple[Op, int]]] = {}
        for op in self.ops:
            for position, ref in enumerate(op.operands):
                found.setdefault(ref, []).append((op, position))
        return {ref: tuple(uses) for ref, uses in found.items()}

    @property
    def weights(self) -> Iterator[Op]:
        """The parameters, in order."""
        return (op for op in self.ops if op.kind == "parameter")

    def verify(self) -> None:
        """Check that the graph is well-formed: each operand is defined before its use.

        Raises:
            CaptureError: it is not; a bug in autoshard rather than in the model.
        """
        seen: set[str] = set()
        for op in self.ops:
            for ref in op.operands:
                if ref.op not in seen:
                    raise CaptureError(f"{op.name} takes {ref} before it is defined.", op.module)
            if op.name in seen:
                raise CaptureError(f"Two operators are named {op.name}.", op.module)
            seen.add(op.name)

    def text(self) -> str:
        """The graph as text, a line an operator: what golden tests and fingerprints are made of."""
        return "\n".join(map(_op_text, self.ops))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the graph's text: equal for equal models with equal example shapes."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]


def _op_text(op: Op) -> str:
    results = ", ".join("-" if meta is None else str(meta) for meta in op.results)
    given = [_value_text(arg, op) for arg in op.args]
    given += [f"{key}={_value_text(value, op)}" for key, value in op.kwargs]
    return f"%{op.name} = {op.kind} {op.target}({', '.join(given)}) -> {results}"


def _value_text(value: object, op: Op) -> str:
    if isinstance(value, Slot):
        return str(op.operands[value.position])
    if isinstance(value, tuple):
        return f"[{', '.join([_value_text(item, op) for item in value])}]"
    return str(value)


def fill_slots(value: object, fill: Callable[[int], object]) -> object:
    """`value`, a nest of tuples, with `fill(position)` in place of each slot."""
    if isinstance(value, Slot):
        return fill(value.position)
    if isinstance(value, tuple):
        return tuple([fill_slots(item, fill) for item in value])
    return value
