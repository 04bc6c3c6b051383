"""Predicted steps against measured ones: forward, backward and optimizer, of models under known plans.

The machine is calibrated with as many ranks as then train. All models are built before the first is timed,
and their steps are interleaved, round after round. What was measured is kept in a folder, so that
predictions can be made again without measuring:

    python benchmarks/cost_model.py --ranks 2 --phase plan         the plans, as JSON
    python benchmarks/cost_model.py --ranks 2 --phase calibrate    the machine
    python benchmarks/cost_model.py --ranks 2 --phase measure      the steps
    python benchmarks/cost_model.py --ranks 2 4 --phase predict    the table

Without --phase, all of them. Exits 1 where a bound is not kept and --strict is given.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from cost_cases import CASES, build, plan_of
from rich.console import Console
from rich.table import Table

import autoshard
from autoshard.capture import capture
from autoshard.cost.calibration import Calibration, Measured, calibrated
from autoshard.cost.hardware import Hardware, load_hardware
from autoshard.plan_types import Cost, Plan
from autoshard.planner import recost
from autoshard.runtime.calibrate import calibrate

RANK_BOUND, ERROR_BOUND = 0.9, 0.2
PHASES = ("plan", "calibrate", "measure", "predict")
WARM = 2
"""Rounds that are not counted."""


@dataclass(frozen=True)
class Pair:
    """A model under a plan on so many ranks: its step predicted and measured, in seconds."""

    model: str
    plan: str
    ranks: int
    cost: Cost
    measured_s: float
    spread: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.cost.step_s / self.measured_s - 1


# --- on the ranks --------------------------------------------------------------------------------


def _on_ranks(work: str, ranks: int, folder: Path, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as meeting:
        given = (work, ranks, str(folder), rounds, meeting)
        multiprocessing.spawn(_rank, given, nprocs=ranks)


def _rank(rank: int, work: str, ranks: int, folder: str, rounds: int, meeting: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{meeting}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found = _calibrate() if work == "calibrate" else _measure(Path(folder), ranks, rounds)
    if rank == 0:
        Path(folder, f"{work}-{ranks}.json").write_text(json.dumps(found, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def _calibrate() -> dict[str, Any]:
    found = calibrate()
    return {"measured": [asdict(fit.measured) for fit in found.fits]}


def _measure(folder: Path, ranks: int, rounds: int) -> dict[str, list[list[float]]]:
    """For each case, round by round: forward, backward and optimizer, averaged over the ranks."""
    logging.getLogger("autoshard").setLevel(logging.ERROR)
    steps = {}
    for name, kind in CASES:
        model, kwargs = build(name, kind)
        plan = folder / f"{name}-{kind}-{ranks}.json"
        sharded = autoshard.autoshard(model, kwargs=kwargs, plan=plan).train()
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4, fused=True)
        steps[f"{name}-{kind}"] = (sharded, kwargs, optimizer)
    times: dict[str, list[list[float]]] = {name: [] for name in steps}
    for number in range(rounds + WARM):
        for name, step in steps.items():
            taken = torch.tensor(_step(*step), dtype=torch.float64)
            dist.all_reduce(taken)
            if number >= WARM:
                times[name].append((taken / ranks).tolist())
    return times


def _step(model: Any, kwargs: dict[str, Any], optimizer: Any) -> tuple[float, float, float]:
    dist.barrier()
    started = time.perf_counter()
    out = model(**kwargs)
    loss = out if isinstance(out, torch.Tensor) else out.loss
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    return forward - started, backward - forward, time.perf_counter() - backward


# --- here ------------------------------------------------------------------------------------------


def _graphs() -> dict[tuple[str, bool], Any]:
    """What is captured of each model, with its usual batch and with that of sequence splits."""
    found = {}
    for name, kind in CASES:
        if (name, kind == "sequence") not in found:
            model, kwargs = build(name, kind)
            found[name, kind == "sequence"] = capture(model, (), kwargs)
    return found


def _plan(folder: Path, ranks: int, graphs: dict[tuple[str, bool], Any]) -> None:
    for name, kind in CASES:
        plan = plan_of(graphs[name, kind == "sequence"], kind, ranks)
        plan.save(folder / f"{name}-{kind}-{ranks}.json")


def calibration(folder: Path, ranks: int) -> Calibration:
    """Fitted again from what was measured."""
    found = json.loads((folder / f"calibrate-{ranks}.json").read_text())
    base = replace(load_hardware("cpu-gloo"), synchronous=True)
    return calibrated(base, [Measured(**item) for item in found["measured"]])


def _predict(
    folder: Path, ranks: int, hardware: Hardware, graphs: dict[tuple[str, bool], Any]
) -> list[Pair]:
    times, found = json.loads((folder / f"measure-{ranks}.json").read_text()), []
    for name, kind in CASES:
        plan = Plan.load(folder / f"{name}-{kind}-{ranks}.json")
        _, again, _ = recost(graphs[name, kind == "sequence"].graph, plan, hardware)
        steps = [sum(parts) for parts in times[f"{name}-{kind}"]]
        middle = statistics.median(steps)
        spread = statistics.median(abs(step - middle) for step in steps) / middle
        found.append(Pair(name, kind, ranks, again.cost, middle, spread))
    return found


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation: of the ranks, the covariance over the variance; none tie."""
    x, y = ([sorted(values).index(value) for value in values] for values in (a, b))
    mean = (len(a) - 1) / 2
    above = sum((i - mean) * (j - mean) for i, j in zip(x, y, strict=True))
    return above / sum((i - mean) ** 2 for i in x)


def show(pairs: list[Pair], title: str, console: Console) -> bool:
    """The table, and whether the bounds are kept."""
    table = Table(title=title)
    for heading in ("model", "plan", "ranks"):
        table.add_column(heading)
    for heading in ("computing", "moving", "predicted", "measured", "±", "off by"):
        table.add_column(heading, justify="right")
    for pair in pairs:
        times = (pair.cost.compute_s, pair.cost.comm_s, pair.cost.step_s, pair.measured_s)
        numbers = [f"{1e3 * time_s:.0f} ms" for time_s in times]
        last = (f"{100 * pair.spread:.0f}%", f"{100 * pair.error:+.0f}%")
        table.add_row(pair.model, pair.plan, str(pair.ranks), *numbers, *last)
    console.print(table)
    ranked = spearman([p.cost.step_s for p in pairs], [p.measured_s for p in pairs])
    middle = statistics.median(abs(pair.error) for pair in pairs)
    kept = ranked >= RANK_BOUND and middle <= ERROR_BOUND
    console.print(
        f"Spearman {ranked:.3f} (at least {RANK_BOUND}), median error {100 * middle:.1f}% "
        f"(at most {100 * ERROR_BOUND:.0f}%), {len(pairs)} pairs: {'kept' if kept else 'NOT kept'}"
    )
    return kept


def main() -> int:
    """Run the phases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--folder", type=Path, default=Path("cost-model"), help="what is kept")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--strict", action="store_true")
    options = parser.parse_args()
    # What the ranks inherit: one thread each.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    options.folder.mkdir(parents=True, exist_ok=True)
    needed = {"plan", "predict"} & set(options.phase)
    graphs = _graphs() if needed else {}
    pairs, kept = [], True
    console = Console()
    for ranks in options.ranks:
        if "plan" in options.phase:
            _plan(options.folder, ranks, graphs)
        for work in ("calibrate", "measure"):
            if work in options.phase:
                _on_ranks(work, ranks, options.folder, options.rounds)
        if "predict" in options.phase:
            fitted = calibration(options.folder, ranks).hardware
            found = _predict(options.folder, ranks, fitted, graphs)
            kept &= show(found, f"A training step on {ranks} gloo ranks", console)
            pairs += found
    if len(options.ranks) > 1 and pairs:
        kept &= show(pairs, "All of them", console)
    return 1 if options.strict and not kept else 0


if __name__ == "__main__":
    sys.exit(main())
