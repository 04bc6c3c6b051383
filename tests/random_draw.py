"""Draw a random program: a state that grows step by step, each step run as it is drawn.

A step is kept where it runs and its results are finite, small and of moderate values: what a program computes must
be well-conditioned, or rounding alone would tell sharded from unsharded.
"""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from random_programs import Leaf, Program, Step, pruned
from torch import Tensor, nn

SIZES = (2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 12, 12, 1)
MOST = 1500
"""Elements of a value."""
LARGEST = 300.0
"""Magnitude of a value's elements."""

Production = Callable[["Draw"], None]


class Skip(Exception):
    """A production cannot be used here: another is drawn."""


class Draw:
    """A program that is being drawn.

    Attributes:
        rng: what draws.
        sizes: the few sizes that this program's dimensions have, so that values fit together.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sizes = tuple(rng.sample(SIZES, 4))
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.values: dict[str, Tensor] = {}
        self._scope: dict[str, Any] = {"torch": torch, "F": nn.functional}

    # --- choosing ---

    def size(self) -> int:
        """A size of this program's."""
        return self.rng.choice(self.sizes)

    def chance(self, share: float) -> bool:
        """True that often."""
        return self.rng.random() < share

    def choice(self, items: Any) -> Any:
        """One of the items."""
        if not items:
            raise Skip
        return self.rng.choice(list(items))

    def value(self, fits: Callable[[Tensor], bool] = lambda v: True) -> str:
        """A float value that fits; recent ones more often."""
        found = [n for n, v in self.values.items() if v.is_floating_point() and fits(v)]
        if not found:
            raise Skip
        at = max(self.rng.random(), self.rng.random())
        return found[int(at * len(found))]

    def ranked(self, low: int = 1, high: int = 4) -> str:
        """A float value of so many dimensions."""
        return self.value(lambda v: low <= v.dim() <= high)

    def other(self, fits: Callable[[Tensor], bool]) -> str:
        """A value of another dtype that fits."""
        found = [n for n, v in self.values.items() if not v.is_floating_point() and fits(v)]
        return self.choice(found)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value."""
        return tuple(self.values[name].shape)

    def dim(self, name: str) -> int:
        """A dimension of a value, sometimes counted from the end."""
        rank = self.values[name].dim()
        if rank == 0:
            raise Skip
        at = self.rng.randrange(rank)
        return at - rank if self.chance(0.3) else at

    # --- making ---

    def leaf(self, kind: str, shape: tuple[int, ...], values: str = "normal") -> str:
        """A new leaf."""
        letter = {"parameter": "w", "frozen": "w", "buffer": "b", "input": "x"}[kind]
        name = f"{letter}{sum(x.name[0] == letter for x in self.leaves)}"
        grad = kind == "input" and values == "normal" and self.chance(0.5)
        self.leaves.append(Leaf(name, kind, shape, values, grad))
        self.values[name] = self._scope[name] = self.leaves[-1].draw()
        return name

    def weight(self, *shape: int) -> str:
        """A weight: an old one of that shape at times (a tie), frozen at times."""
        if max(shape, default=1) * max(1, len(shape)) > MOST:
            raise Skip
        known = [
            x.name
            for x in self.leaves
            if x.shape == shape and x.name[0] == "w" and x.values == "normal"
        ]
        if known and self.chance(0.3):
            return self.choice(known)
        return self.leaf("frozen" if self.chance(0.12) else "parameter", shape)

    def table(self, *shape: int) -> str:
        """A stored tensor: a weight, or a buffer, or an input."""
        roll = self.rng.random()
        if roll < 0.55:
            return self.weight(*shape)
        return self.leaf("buffer" if roll < 0.75 else "input", shape)

    def ids(self, high: int, *shape: int) -> str:
        """Whole numbers below `high`: an input, or a buffer."""
        return self.leaf("input" if self.chance(0.7) else "buffer", shape, str(high))

    def module(self, text: str) -> str:
        """A new module, or an old one that was made alike: then it is called twice."""
        known = [x.name for x in self.leaves if x.values == text]
        if known and self.chance(0.4):
            return self.choice(known)
        name = f"m{sum(x.kind == 'module' for x in self.leaves)}"
        leaf = Leaf(name, "module", (), text)
        self._scope[name] = leaf.build()
        self.leaves.append(leaf)
        return name

    def emit(self, text: str, before: str = "") -> str:
        """Add a step with one result."""
        return self.emit_many(text, 1, before)[0]

    def emit_many(self, text: str, count: int, before: str = "") -> tuple[str, ...]:
        """Add a step with so many results (one: not a tuple)."""
        made = self._run(text)
        results = tuple(made) if count > 1 else (made,)
        if len(results) != count or not all(map(_moderate, results)):
            raise Skip
        number = sum(len(step.results) for step in self.steps)
        names = tuple(f"v{number + i}" for i in range(count))
        self.steps.append(Step(names, text, _names(text), before))
        self.values.update(zip(names, results, strict=True))
        self._scope.update(zip(names, results, strict=True))
        return names

    def write(self, text: str) -> None:
        """Add a step that writes to memory and makes no value."""
        before = {n: v.clone() for n, v in self.values.items()}
        try:
            exec(text, self._scope)
        except (RuntimeError, IndexError, TypeError, ValueError):
            raise Skip from None
        if not all(map(_moderate, self.values.values())):
            for name, v in before.items():
                with contextlib.suppress(RuntimeError):  # expanded: what it shares is put back
                    self.values[name].copy_(v)
            raise Skip
        self.steps.append(Step((), text, _names(text)))

    def _run(self, text: str) -> Any:
        try:
            return eval(text, self._scope)
        except (RuntimeError, IndexError, TypeError, ValueError):
            raise Skip from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r"\b[vwbxm]\d+\b", text)))


def _moderate(x: object) -> bool:
    if not isinstance(x, Tensor) or not 0 < x.numel() <= MOST or x.dim() > 5:
        return False
    if not x.is_floating_point():
        return x.dtype == torch.bool or x.is_complex() or bool(x.abs().max() < 10_000)
    top = float(x.abs().max())
    return top <= LARGEST  # False for NaN


def draw(seed: int, productions: list[Production], weights: list[float]) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    state = Draw(rng)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rank = rng.choice((1, 2, 2, 3, 3, 4))
        state.leaf("input", tuple(state.size() for _ in range(rank)))
        wanted = rng.randint(2, 12)
        for _ in range(60):
            kept = len(state.steps), dict(state.values), len(state.leaves), dict(state._scope)
            try:
                rng.choices(productions, weights)[0](state)
            except Skip:
                _undo(state, *kept)
            if len(state.steps) >= wanted:
                break
    return _finished(state, seed)


def _undo(state: Draw, steps: int, values: dict, leaves: int, scope: dict) -> None:
    """Forget a production that gave up halfway; what it wrote to memory it has undone itself."""
    del state.steps[steps:], state.leaves[leaves:]
    state.values, state._scope = values, scope


def _finished(state: Draw, seed: int) -> Program:
    """The program with its outputs: what nothing takes, and a few values besides."""
    rng = state.rng
    taken = {name for step in state.steps for name in step.operands}
    made = [name for step in state.steps for name in step.results]
    ends = [name for name in made if name not in taken]
    rng.shuffle(ends)
    outputs = ends[: rng.randint(1, 4)] or made[-1:]
    outputs += [n for n in rng.sample(made, min(2, len(made))) if rng.random() < 0.3]
    repeats = 1
    first = state.leaves[0]
    same = [n for n in made if tuple(state.values[n].shape) == first.shape]
    same = [n for n in same if state.values[n].dtype == torch.float64]
    if same and rng.random() < 0.2:
        outputs, repeats = [same[-1], *outputs], rng.choice((2, 3))
    kept = [x.name for x in state.leaves if x.kind != "module"]
    outputs += [rng.choice(kept)] if rng.random() < 0.08 else []
    outputs += [rng.choice(outputs)] if outputs and rng.random() < 0.05 else []
    outputs = outputs or [first.name]
    return pruned(Program(seed, tuple(state.leaves), tuple(state.steps), tuple(outputs), repeats))
