"""Predicted peak memory of a training step against a measured one, on real gloo ranks.

Every rank counts the bytes of its live tensors, operator by operator (`autoshard.runtime.live_memory`), in a
step of forward, backward and AdamW whose optimizer state exists already; the largest count over the ranks
is compared with the plan's `cost.memory.peak_bytes`. Then a budget is shrunk, from what the fastest plan
takes to the least that fits, and every plan on the way is measured too.

    python benchmarks/memory.py --ranks 2 4

Exits 1 where a bound is not kept and --strict is given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from memory_cases import MODELS, PLANS, built
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autoshard
from autoshard.errors import InfeasibleError
from autoshard.plan_types import Plan
from autoshard.report import format as fmt
from autoshard.runtime.live_memory import held, peak_bytes

OVER, UNDER = 0.10, 0.05
"""By how much a prediction may be above what is measured, and below."""
BUDGETS = 6
STEPS = 4
"""Steps that are counted; the least is taken, for gloo's threads may hold what they sent for a moment."""


@dataclass(frozen=True)
class Row:
    """One plan: its peak predicted and measured, in bytes."""

    model: str
    plan: str
    ranks: int
    predicted_bytes: int
    measured_bytes: int
    step_s: float
    peak_at: str
    budget_bytes: int | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def kept(self) -> bool:
        """Whether it is within the bounds, and within its budget when measured."""
        fits = self.budget_bytes is None or self.measured_bytes <= self.budget_bytes
        return -UNDER <= self.error <= OVER and fits


def loss_of(out: Any) -> Tensor:
    """The loss that a model returns, or the sum of what it returns."""
    if isinstance(out, Tensor):
        return out if not out.shape else out.sum()
    if getattr(out, "loss", None) is not None:
        return out.loss
    return sum(x.sum() for x in out.values() if isinstance(x, Tensor))  # type: ignore[return-value]


def measured_bytes(model: nn.Module, kwargs: dict[str, Any], plan: Plan) -> int:
    """The peak of a step on this rank, after one that makes the optimizer's state."""
    sharded = autoshard.autoshard(model, kwargs=kwargs, plan=plan)
    optimizer = torch.optim.AdamW(sharded.parameters())

    def step() -> None:
        out = sharded(**kwargs)
        loss_of(out).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    inputs = [x for x in kwargs.values() if isinstance(x, Tensor)]
    constants = sharded.first_prepared.captured.tensors.values()
    kept = [*held(sharded, optimizer), *inputs, *constants]
    return min(peak_bytes(step, kept) for _ in range(STEPS))


# --- on the ranks --------------------------------------------------------------------------------


def _rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    wanted = json.loads(Path(f"{folder}/wanted.json").read_text())
    found = []
    for name, path in wanted:
        model, kwargs = built(name)
        mine = torch.tensor(measured_bytes(model, kwargs, Plan.load(path)))
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        found.append(int(mine))
    if rank == 0:
        Path(f"{folder}/found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(plans: list[tuple[str, Plan]], ranks: int) -> list[int]:
    """The measured peak of each (model, plan), the largest of the ranks'."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = []
        for number, (name, plan) in enumerate(plans):
            path = f"{folder}/{number}.json"
            plan.save(path)
            wanted.append((name, path))
        Path(f"{folder}/wanted.json").write_text(json.dumps(wanted))
        multiprocessing.spawn(_rank, (ranks, folder), nprocs=ranks)
        return json.loads(Path(f"{folder}/found.json").read_text())


# --- what to measure -----------------------------------------------------------------------------


def plans_of(names: list[str], ranks: int) -> list[tuple[str, str, Plan]]:
    """(model, plan's name, plan) for every model."""
    found = []
    for name in names:
        model, kwargs = built(name)
        for kind, (hardware, search) in PLANS.items():
            plan = autoshard.plan(model, ranks, (), kwargs, hardware=hardware, search=search)
            found.append((name, kind, plan))
    return found


def shrinking(name: str, ranks: int) -> list[tuple[str, str, Plan]]:
    """Plans of a model under a budget that shrinks, to the least that fits."""
    model, kwargs = built(name)

    def plan(budget: int | None) -> Plan:
        return autoshard.plan(
            model, ranks, (), kwargs, hardware="cpu-gloo", search="all", memory_budget=budget
        )

    free, least = plan(None), _least(plan)
    most, found = free.cost.memory.peak_bytes, [(name, "unbounded", free)]
    for number in range(BUDGETS):
        budget = int(most + (least - most) * (number + 1) / BUDGETS)
        found.append((name, f"at most {fmt.size(budget)}", plan(budget)))
    return found


def _least(plan: Callable[[int], Plan]) -> int:
    """The least budget that fits: what the error for one that does not names."""
    try:
        return plan(1024).cost.memory.peak_bytes
    except InfeasibleError as error:
        return error.least_budget_bytes or 0


def rows(plans: list[tuple[str, str, Plan]], ranks: int) -> list[Row]:
    """Each plan, measured."""
    sizes = measure([(name, plan) for name, _, plan in plans], ranks)
    return [
        Row(
            name,
            kind,
            ranks,
            plan.cost.memory.peak_bytes,
            size,
            plan.cost.step_s,
            plan.cost.memory.peak_at,
            plan.memory_budget_bytes,
        )
        for (name, kind, plan), size in zip(plans, sizes, strict=True)
    ]


def table(title: str, found: list[Row]) -> Table:
    """The rows, those out of bounds in red."""
    made = Table(title=title)
    for heading in (
        "model",
        "plan",
        "ranks",
        "predicted",
        "measured",
        "error",
        "step",
        "when most is held",
    ):
        made.add_column(
            heading,
            justify="left" if heading in ("model", "plan", "when most is held") else "right",
        )
    for row in found:
        made.add_row(
            row.model,
            row.plan,
            str(row.ranks),
            fmt.size(row.predicted_bytes),
            fmt.size(row.measured_bytes),
            f"{row.error:+.1%}",
            fmt.seconds(row.step_s),
            row.peak_at,
            style="" if row.kept else "red",
        )
    return made


def main() -> None:
    """Measure, print the tables, and say whether the bounds are kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--budgets-of", choices=MODELS, default="llama")
    parser.add_argument("--strict", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    console, kept = Console(width=150), True
    for ranks in options.ranks:
        found = rows(plans_of(options.models, ranks), ranks)
        console.print(table(f"Peak memory of a training step on {ranks} ranks", found))
        errors = sorted(row.error for row in found)
        console.print(f"{len(found)} plans: from {errors[0]:+.1%} to {errors[-1]:+.1%}\n")
        leaner = rows(shrinking(options.budgets_of, ranks), ranks)
        console.print(table(f"{options.budgets_of} under a shrinking budget", leaner))
        monotone = all(a.step_s <= b.step_s * (1 + 1e-9) for a, b in itertools.pairwise(leaner))
        console.print(
            "Each is as slow as the one before, or slower.\n" if monotone else "NOT monotone\n"
        )
        kept &= all(row.kept for row in (*found, *leaner)) and monotone
    sys.exit(int(options.strict and not kept))


if __name__ == "__main__":
    main()
