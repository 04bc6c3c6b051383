"""Random programs under random placements: sharded must equal unsharded, gradients and all.

    python tests/random_graphs.py --graphs 10000 --seed 0

A program (`random_productions`) is captured once. Then, for 2, 3 and 4 ranks and both searches, every operator is
given one of its strategies at random: the solver's optimum hides most of what may be chosen. Outputs, every
gradient, inputs and buffers afterwards are compared in float64. A difference that rounding noise in the unsharded
program makes too is no fault. A fault is shrunk, and printed as a program to paste.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import random_patterns  # noqa: F401 - adds its productions
import torch
from random_draw import draw
from random_placements import choose
from random_productions import PRODUCTIONS, WEIGHTS
from random_programs import Program, smaller
from torch import Tensor, nn

from autoshard.capture import Captured, capture
from autoshard.errors import CaptureError
from autoshard.fold import Folded, fold
from autoshard.graph import Ref
from autoshard.mesh import Mesh
from autoshard.placement import Partial, Shard
from autoshard.planner import Decided
from autoshard.rewrite import rewrite
from autoshard.runtime.backend import Backend, SimulatorBackend
from autoshard.strategies import Strategies, derive, find_rules

BOUND = 1e-9
NOISE = 1e-13
SMALL = 1e-3
"""A gradient that is zero in exact arithmetic is compared with this share of the largest one."""
RANKS = (2, 3, 4)
SEARCHES = ("tensor", "all")


@dataclass(frozen=True)
class Outcome:
    """What a program leaves behind, by name: outputs, gradients, inputs and buffers afterwards."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    afterwards: dict[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """A (program, placement) that is not sound.

    Attributes:
        kind: what is wrong: "output", "gradient", "afterwards", or an exception's name.
        text: in words.
        strategies: the strategies chosen, one a line.
    """

    program: Program
    ranks: int
    search: str
    choice: int
    kind: str
    text: str
    strategies: str = ""

    def __str__(self) -> str:
        how = f"{self.ranks} ranks, search {self.search}, choice {self.choice}"
        return f"{self.kind}: {self.text}\n{how}\n{self.program.text()}\n{self.strategies}"


@dataclass
class Tally:
    """What was run."""

    graphs: int = 0
    pairs: int = 0
    splitting: int = 0
    unplaced: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    noisy: list[Fault] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    operators: Counter[str] = field(default_factory=Counter)
    split: Counter[str] = field(default_factory=Counter)


# --- the unsharded program --------------------------------------------------------------------------


def weighted(outputs: dict[str, Tensor]) -> Tensor | None:
    """A sum that weighs every element of every output differently."""
    total = None
    for index, x in enumerate(outputs.values()):
        if x.requires_grad and x.numel():
            generator = torch.Generator().manual_seed(index)
            weights = torch.rand(x.shape, generator=generator, dtype=torch.float64) + 0.1
            term = (x * weights).sum()
            total = term if total is None else total + term
    return total


def _outcome(outputs: dict[str, Tensor], leaves: dict[str, Tensor]) -> Outcome:
    """Run backward, and read everything."""
    loss = weighted(outputs)
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients: dict[str, Tensor] = {}
    if loss is not None and wanted:
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        gradients = {n: g for n, g in zip(wanted, found, strict=True) if g is not None}
    rest = {name: x.detach() for name, x in leaves.items()}
    return Outcome({n: x.detach() for n, x in outputs.items()}, gradients, rest)


def unsharded(program: Program, noise: float = 0.0, seed: int = 0) -> Outcome:
    """What the model itself computes; with noise of that relative size on each step's result."""
    generator = torch.Generator().manual_seed(seed)

    def disturb(x: Any) -> None:
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            size = noise * float(x.detach().abs().max())
            wave = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
            try:
                x.data.add_(wave * size + x.detach() * wave * noise)
            except RuntimeError:
                return  # an expanded tensor: several elements are one

    model = program.module(disturb if noise else None)
    arguments = program.arguments()
    if noise:
        for x in (*arguments, *model.parameters()):
            disturb(x.detach())
    torch.manual_seed(0)
    made = model(*(x.view_as(x) if x.requires_grad else x for x in arguments))
    outputs = {str(i): x for i, x in enumerate(made) if isinstance(x, Tensor)}
    return _outcome(outputs, _leaves(model, dict(zip(_names(program), arguments, strict=True))))


def _names(program: Program) -> list[str]:
    return [leaf.name for leaf in program.inputs]


def _leaves(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **inputs}


# --- the sharded program ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """A captured program with its classes."""

    program: Program
    captured: Captured
    folded: Folded
    rules: tuple[Any, ...]


def prepared(program: Program) -> Ready:
    """Capture a program."""
    captured = capture(program.module(), program.arguments())
    folded = fold(captured.graph, uniform=program.seed % 3 > 0)
    return Ready(program, captured, folded, find_rules(folded))


def strategies(ready: Ready, ranks: int, search: str) -> Strategies:
    """What may be chosen."""
    return derive(ready.folded, Mesh.of({"tp": ranks}), search=search, rules=ready.rules)


def sharded(ready: Ready, decided: Decided, backend: Backend) -> Outcome:
    """What the ranks compute."""
    program = rewrite(ready.captured, decided, backend.device)
    model, arguments = ready.program.module(), ready.program.arguments()
    stored = _leaves(model, {})
    given = dict(zip([n for n, _ in ready.captured.inputs], arguments, strict=True))
    held, tensors = {}, []
    for leaf in program.leaves:
        name = leaf.op.name
        if leaf.op.kind == "input":
            x = given[name]
            tensors.append(x.view_as(x) if x.requires_grad and leaf.written else x)
        elif leaf.op.kind == "constant":
            tensors.append(backend.to_device(ready.captured.tensors[name].clone()))
        else:
            tensors.append(backend.hold(leaf, stored[leaf.op.fqns[0]]))
            held[leaf.op.fqns[0]] = tensors[-1]
    torch.manual_seed(0)
    made = iter(backend.run(program, tensors, backend.compile(program)))
    values = [next(made) if isinstance(x, Ref) else x for x in ready.captured.outputs]
    outputs = {str(i): x for i, x in enumerate(values) if isinstance(x, Tensor)}
    found = _outcome(outputs, {**held, **dict(zip(_names(ready.program), arguments, strict=True))})
    return Outcome(*({n: backend.whole(x) for n, x in part.items()} for part in _parts(found)))


def _parts(found: Outcome) -> tuple[dict[str, Tensor], ...]:
    return found.outputs, found.gradients, found.afterwards


# --- comparing --------------------------------------------------------------------------------------


def difference(found: Outcome, wanted: Outcome, bound: float = BOUND) -> tuple[str, str] | None:
    """The first difference, as (kind, words); None where there is none."""
    grads = [float(g.abs().max()) for g in wanted.gradients.values() if g.numel()]
    floor = SMALL * max(grads, default=0.0)
    kinds = ("output", 1e-4), ("gradient", max(floor, 1e-4)), ("afterwards", 1e-4)
    for (kind, low), ours, theirs in zip(kinds, _parts(found), _parts(wanted), strict=True):
        for name in {**ours, **theirs}:
            wrong = _off(ours.get(name), theirs.get(name), low, bound)
            if wrong:
                return kind, f"{name} {wrong}"
    return None


def _off(a: Tensor | None, b: Tensor | None, floor: float, bound: float) -> str:
    """What is wrong with `a`, which should be `b`; a gradient that is missing is zero."""
    if a is None or b is None:
        only = b if a is None else a
        assert only is not None
        return "is missing on one side" if only.any() else ""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"is {a.dtype}{list(a.shape)}, wanted {b.dtype}{list(b.shape)}"
    if torch.equal(a, b):
        return ""
    x, y = (torch.view_as_real(t) if t.is_complex() else t.double() for t in (a, b))
    off = (x - y).abs().masked_fill(torch.isclose(x, y, rtol=0, atol=0, equal_nan=True), 0.0)
    error = float(off.nan_to_num(float("inf")).max()) / max(
        float(y.abs().nan_to_num(0).max()), floor
    )
    return "" if error <= bound else f"is off by {error:.1e}"


def bound_of(ready: Ready) -> float:
    """The relative error allowed: looser where a program computes in float32."""
    metas = [meta for op in ready.captured.graph.ops for meta in op.results if meta]
    return 1e-4 if any(meta.dtype == "float32" for meta in metas) else BOUND


def noisy(ready: Ready, wanted: Outcome) -> bool:
    """Whether noise of rounding's size alone makes such a difference: then nothing can be told."""
    for seed in range(3):
        try:
            if difference(unsharded(ready.program, NOISE, seed), wanted, 0.02 * bound_of(ready)):
                return True
        except RuntimeError:
            return True
    return False


# --- one program --------------------------------------------------------------------------------


def placements(seed: int, per_graph: int) -> Iterator[tuple[int, str, int]]:
    """(ranks, search, seed of the choice) for each placement of a program."""
    for i in range(per_graph):
        yield RANKS[(seed + i) % 3], SEARCHES[(seed + i // 3) % 2], 1000 * seed + i


def attempt(
    ready: Ready,
    wanted: Outcome,
    ranks: int,
    search: str,
    choice: int,
    tally: Tally | None = None,
    backend: Backend | None = None,
) -> Fault | None:
    """Run one placement; the fault, if there is one."""
    program = ready.program
    try:
        decided = choose(strategies(ready, ranks, search), choice)
        if decided is None:
            if tally is not None:
                tally.unplaced += 1
            return None
        if tally is not None:
            _count(tally, decided)
        wrong = difference(
            sharded(ready, decided, backend or SimulatorBackend()), wanted, bound_of(ready)
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a fault
        words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Fault(program, ranks, search, choice, type(error).__name__, words)
    if wrong is None:
        return None
    return Fault(program, ranks, search, choice, wrong[0], wrong[1], _chosen(decided))


def _count(tally: Tally, decided: Decided) -> None:
    """Count a placement, whether it splits anything, and the operators that run split."""
    tally.pairs += 1
    before = tally.split.total()
    for cls, index, options in zip(
        decided.folded.classes, decided.choice, decided.strategies.choices, strict=True
    ):
        layouts = (*options[index].operands, *options[index].results)
        if any(isinstance(layout[0], (Shard, Partial)) for layout in layouts):
            tally.split[cls.op.target] += 1
    tally.splitting += tally.split.total() > before


def _chosen(decided: Decided) -> str:
    lines = []
    for cls, index, options in zip(
        decided.folded.classes, decided.choice, decided.strategies.choices, strict=True
    ):
        names = ", ".join(map(str, cls.op.operands))
        lines.append(f"#   %{cls.op.name} = {cls.op.target}({names})  {options[index]}")
    return "\n".join(lines)


def run(seed: int, per_graph: int, tally: Tally) -> None:
    """Draw, capture, place and compare the program of a seed."""
    program = draw(seed, PRODUCTIONS, WEIGHTS)
    try:
        wanted = unsharded(program)
    except RuntimeError as error:  # autograd's own refusal of a write
        tally.refused[f"eager: {str(error).splitlines()[0][:60]}"] += 1
        return
    try:
        ready = prepared(program)
    except CaptureError as error:
        tally.refused[f"capture: {str(error).splitlines()[0][:60]}"] += 1
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a fault
        tally.faults.append(Fault(program, 0, "", 0, f"capture {type(error).__name__}", str(error)))
        return
    tally.graphs += 1
    tally.operators.update({op.target for op in ready.captured.graph.ops if op.kind == "call"})
    for ranks, search, choice in placements(seed, per_graph):
        fault = attempt(ready, wanted, ranks, search, choice, tally)
        if fault is None:
            continue
        if noisy(ready, wanted):
            tally.noisy.append(fault)
        else:
            tally.faults.append(fault)
        return


def assert_placements_sound(program: Program, choices: int = 12) -> Tally:
    """Run one program under many placements, on every number of ranks and in both searches."""
    wanted, ready, tally = unsharded(program), prepared(program), Tally()
    for ranks in RANKS:
        for search in SEARCHES:
            for choice in range(choices):
                fault = attempt(ready, wanted, ranks, search, choice, tally)
                assert fault is None, str(fault)
    return tally


def shrunk(fault: Fault, tries: int = 12, limit_s: float = 60.0) -> Fault:
    """The smallest program found that shows a fault of the same kind under some placement."""
    end = time.monotonic() + limit_s
    again = True
    while again and time.monotonic() < end:
        again = False
        for program in smaller(fault.program):
            found = _shows(program, fault, tries) if time.monotonic() < end else None
            if found is not None:
                fault, again = found, True
                break
    return fault


def _shows(program: Program, fault: Fault, tries: int) -> Fault | None:
    """The same kind of fault in another program."""
    try:
        wanted = unsharded(program)
        ready = prepared(program)
    except Exception:  # noqa: BLE001 - a program that does not run shows nothing
        return None
    for choice in range(tries):
        found = attempt(ready, wanted, fault.ranks, fault.search, choice)
        if found is not None and found.kind == fault.kind and not noisy(ready, wanted):
            return found
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--placements", type=int, default=6, help="for each program")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--shrink", type=int, default=5, help="how many faults to shrink")
    parser.add_argument("--coverage", action="store_true", help="list operators that were run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tally, start = Tally(), time.monotonic()
    seed = options.seed
    while tally.graphs < options.graphs and time.monotonic() - start < options.seconds:
        run(seed, options.placements, tally)
        seed += 1
    took = time.monotonic() - start
    print(
        f"seeds {options.seed}..{seed - 1}: {tally.graphs} graphs, {tally.pairs} placements ({tally.splitting} split something, {tally.unplaced} had no placement), {took:.0f} s"
    )
    print(f"{len(tally.faults)} faults, {len(tally.noisy)} left out for rounding noise, refused:")
    for what, count in tally.refused.most_common(30):
        print(f"  {count:5} {what}")
    kinds = Counter((f.kind, f.text[:70]) for f in tally.faults)
    for (kind, text), count in kinds.most_common(40):
        print(f"  fault {count:4} × {kind}: {text}")
    print("seeds with faults:", " ".join(str(f.program.seed) for f in tally.faults))
    print("seeds left out:", " ".join(str(f.program.seed) for f in tally.noisy))
    if options.coverage:
        for name, count in sorted(tally.operators.items()):
            print(f"  {name} in {count} graphs, split {tally.split[name]} times")
    for fault in tally.faults[: options.shrink]:
        print("-" * 80, f"\nseed {fault.program.seed}\n", shrunk(fault))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
