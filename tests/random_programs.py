"""Random programs as data: leaves, steps of source text, outputs. They print as models and shrink.

A program is what `random_productions` draws. Each step is a line of Python, so a program that shows a fault
can be pasted into a test; shrinking needs to know nothing of operators, for it replaces what a step makes
by an older value, or by a new input, of the same shape.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import random_operators  # noqa: F401 - programs may call torch.ops.random_graphs.*
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Leaf:
    """A tensor that a program starts from.

    Attributes:
        name: `w0` for a parameter, `b0` for a buffer, `x0` for an input.
        kind: "parameter", "frozen" (a parameter without gradient), "buffer", "input" or "module".
        shape: of the tensor.
        values: "normal", "positive", "bool", or a whole number n as text: integers below n. Of a
            module `m0`, the text that makes it.
        grad: whether an input takes a gradient.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    values: str = "normal"
    grad: bool = False

    def build(self) -> nn.Module:
        """The module: the same whenever it is built."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.values.encode()))
            return eval(self.values, {"torch": torch, "nn": nn}).double()

    def draw(self) -> Tensor:
        """The tensor: the same whenever it is drawn."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.name}{self.shape}".encode()))
        if self.values == "normal":
            return torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.values == "positive":
            return torch.rand(self.shape, generator=generator, dtype=torch.float64) + 0.5
        if self.values == "bool":
            return torch.rand(self.shape, generator=generator) > 0.4
        return torch.randint(0, int(self.values), self.shape, generator=generator)


@dataclass(frozen=True)
class Step:
    """One line: the names it makes, its text, the names it takes, and what stands before it all."""

    results: tuple[str, ...]
    text: str
    operands: tuple[str, ...]
    before: str = ""

    @property
    def line(self) -> str:
        """The line of Python."""
        made = f"{', '.join(self.results)} = " if self.results else ""
        return f"{self.before}{made}{self.text}"


@dataclass(frozen=True)
class Program:
    """A model: leaves, steps, and the names it returns.

    Attributes:
        seed: what it was drawn from.
        repeats: how often the steps run, as layers with weights of their own; the first input of a
            layer is the first output of the one before.
    """

    seed: int
    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    repeats: int = 1

    @staticmethod
    def of(leaves: tuple[Leaf, ...], lines: str, *outputs: str) -> Program:
        """A program written by hand: a line a step, `v1 = F.relu(v0)`."""
        steps = []
        for line in filter(None, map(str.strip, lines.splitlines())):
            before = (re.match(r"with .*?: ", line) or [""])[0]
            left, _, right = line.removeprefix(before).rpartition(" = ")
            operands = tuple(dict.fromkeys(re.findall(r"\b[vwbxm]\d+\b", right)))
            steps.append(Step(tuple(left.split(", ")) if left else (), right, operands, before))
        return Program(1, leaves, tuple(steps), outputs)

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        """The leaves that are arguments."""
        return tuple(leaf for leaf in self.leaves if leaf.kind == "input")

    def source(self, *, traced: bool = False) -> str:
        """The function `forward` as text; `traced` calls `trace` with what each step makes."""
        lines = [f"def forward({', '.join(['self', *(leaf.name for leaf in self.inputs)])}):"]
        stored = [leaf.name for leaf in self.leaves if leaf.kind != "input"]
        lines += [f"    {name} = self.{name}" for name in stored]
        for step in self.steps:
            seen = [f"; trace({name})" for name in step.results] if traced else []
            lines.append("".join([f"    {step.line}", *seen]))
        return "\n".join([*lines, f"    return ({', '.join(self.outputs)},)"])

    def text(self) -> str:
        """The program as a reader wants it: leaves, then the function."""
        kinds = [
            f"# {leaf.name}: {leaf.kind} {list(leaf.shape)} {leaf.values}{' grad' * leaf.grad}"
            for leaf in self.leaves
        ]
        layers = [f"# {self.repeats} layers"] if self.repeats > 1 else []
        return "\n".join([f"# seed {self.seed}", *layers, *kinds, self.source()])

    def module(self, trace: Callable[[Any], None] | None = None) -> nn.Module:
        """The model. `trace` is called with what each step makes."""
        body = self._body(trace)
        if self.repeats == 1:
            return body
        return _Layers([body, *(self._body(trace) for _ in range(self.repeats - 1))])

    def _body(self, trace: Callable[[Any], None] | None) -> nn.Module:
        module = nn.Module()
        for leaf in self.leaves:
            if leaf.kind == "buffer":
                module.register_buffer(leaf.name, leaf.draw())
            elif leaf.kind == "module":
                module.add_module(leaf.name, leaf.build())
            elif leaf.kind != "input":
                grad = leaf.kind == "parameter"
                module.register_parameter(leaf.name, nn.Parameter(leaf.draw(), requires_grad=grad))
        source = self.source(traced=trace is not None)
        scope = {"torch": torch, "F": nn.functional, "nn": nn, "trace": trace}
        exec(compile(source, f"<program {self.seed}>", "exec"), scope)
        kind = type("Body", (nn.Module,), {"forward": scope["forward"]})
        module.__class__ = kind
        return module

    def arguments(self) -> tuple[Tensor, ...]:
        """New tensors for the inputs."""
        return tuple(leaf.draw().requires_grad_(leaf.grad) for leaf in self.inputs)


class _Layers(nn.Module):
    """Layers one after another: what is not handed on is returned."""

    def __init__(self, bodies: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(bodies)

    def forward(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        others: list[Tensor] = []
        for layer in self.layers:
            x, *made = layer(x, *rest)
            others += made
        return (x, *others)


# --- cleaning and shrinking ---------------------------------------------------------------------


def pruned(program: Program) -> Program:
    """Without the leaves and steps that no output needs; what writes to memory stays."""
    needed, kept = set(program.outputs), []
    for step in reversed(program.steps):
        if needed & set(step.results) or (not step.results) or "_(" in step.text:
            kept.append(step)
            needed |= set(step.operands)
    first = program.inputs[0].name if program.repeats > 1 and program.inputs else ""
    leaves = tuple(x for x in program.leaves if x.name in needed or x.name == first)
    return replace(program, leaves=leaves, steps=tuple(reversed(kept)))


def smaller(program: Program) -> Iterator[Program]:
    """Programs one change smaller, the boldest first."""
    if program.repeats > 1:
        yield replace(program, repeats=1)
    if len(program.outputs) > 1:
        for name in program.outputs:
            left = tuple(n for n in program.outputs if n != name)
            yield pruned(replace(program, outputs=left))
    shapes = _shapes(program)
    for at in reversed(range(len(program.steps))):
        yield from _without(program, at, shapes)


def _without(
    program: Program, at: int, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> Iterator[Program]:
    """Programs without step `at`: its results are older values, or new inputs."""
    step = program.steps[at]
    others = program.steps[:at] + program.steps[at + 1 :]
    if not step.results:
        yield pruned(replace(program, steps=others))
        return
    if all(name not in shapes for name in step.results):
        return
    for operand in step.operands:
        if all(shapes.get(name) == shapes.get(operand) for name in step.results):
            names = dict.fromkeys(step.results, operand)
            yield pruned(renamed(replace(program, steps=others), names))
    number = 1 + max([int(x.name[1:]) for x in program.inputs], default=-1)
    fresh, names = [], {}
    for i, name in enumerate(step.results):
        shape, dtype = shapes[name]
        values = "bool" if dtype == torch.bool else "normal" if dtype.is_floating_point else "2"
        if dtype.is_complex:
            return
        names[name] = f"x{number + i}"
        fresh.append(Leaf(names[name], "input", shape, values, values == "normal"))
    made = replace(program, leaves=(*program.leaves, *fresh), steps=others)
    yield pruned(renamed(made, names))


def renamed(program: Program, names: dict[str, str]) -> Program:
    """With values called by other names."""

    def text(line: str) -> str:
        return re.sub(r"\b[vwbxm]\d+\b", lambda found: names.get(found[0], found[0]), line)

    steps = [
        Step(s.results, text(s.text), tuple(names.get(n, n) for n in s.operands), s.before)
        for s in program.steps
    ]
    outputs = tuple(dict.fromkeys(names.get(n, n) for n in program.outputs))
    return replace(program, steps=tuple(steps), outputs=outputs)


def _shapes(program: Program) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each value, by running one layer's steps in order."""
    scope: dict[str, Any] = {"torch": torch, "F": nn.functional}
    body = replace(program, repeats=1).module()
    for leaf in program.leaves:
        scope[leaf.name] = getattr(body, leaf.name, None)
    scope |= dict(zip([x.name for x in program.inputs], program.arguments(), strict=True))
    scope["self"] = body
    for step in program.steps:
        exec(step.line, scope)
    return {
        name: (tuple(value.shape), value.dtype)
        for name, value in scope.items()
        if isinstance(value, Tensor)
    }
