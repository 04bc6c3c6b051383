"""What `make bench` runs: a training step beside torch's own tensor parallelism and a program written by
hand, and planning beside capture. Exits 1 where a bound is not kept and `--strict` is given.
"""

from __future__ import annotations

import argparse
import os
import sys

# Before torch is imported, and inherited by the ranks: each has one thread, as the comparison says.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import llama_step
import planning
from rich.console import Console
from rich.table import Table

BOUNDS = {"parallelize_module": 0.8, "by hand": 1.1}
PLAN_BOUND, GROWTH_BOUND = 1.5, 1.5

console = Console()


def step(settings: llama_step.Settings) -> bool:
    """Time a step; whether the bounds are kept."""
    found = llama_step.run(settings)
    table = Table(
        title=f"A training step of a {settings.layers}-layer Llama on {settings.ranks} gloo ranks",
        caption=f"hidden {settings.hidden}, batch {settings.batch} × {settings.sequence}, vocabulary "
        f"{settings.vocabulary}, AdamW {settings.optimizer}, one thread a rank; medians of "
        f"{settings.rounds} interleaved rounds",
    )
    for heading in ("program", "forward", "backward", "optimizer", "step"):
        table.add_column(heading, justify="left" if heading == "program" else "right")
    for name, row in found["medians_ms"].items():
        parts = (row[part] for part in ("forward", "backward", "optimizer", "step"))
        table.add_row(name, *(f"{value:.1f} ms" for value in parts))
    console.print(table)
    kept = True
    for ours, ratios in found["ratios"].items():
        for theirs, ratio in ratios.items():
            kept &= _line(f"{ours} / {theirs}", ratio, BOUNDS[theirs])
    console.print()
    return kept


def plan(settings: planning.Settings) -> bool:
    """Time planning; whether the bounds are kept."""
    found = planning.run(settings)
    table = Table(
        title=f"Planning a Llama-3-8B of {settings.layers} layers for {settings.ranks} ranks",
        caption=f"{settings.hardware}, on the meta device; medians of {settings.rounds} rounds",
    )
    table.add_column("what")
    table.add_column("time", justify="right")
    for what, key in (
        ("torch.export alone", "export_s"),
        ("autoshard.plan", "plan_s"),
        ("  of it beyond capture", "beyond_capture_s"),
        (f"  … with {settings.few} layers", "few_beyond_capture_s"),
        (f"  … with {settings.many} layers", "many_beyond_capture_s"),
    ):
        table.add_row(what, f"{found[key]:.2f} s")
    console.print(table)
    kept = _line("autoshard.plan / torch.export", found["plan_over_export"], PLAN_BOUND)
    growth = f"beyond capture, {settings.many} layers / {settings.few}"
    return _line(growth, found["growth"], GROWTH_BOUND) and kept


def _line(what: str, ratio: float, bound: float) -> bool:
    kept = ratio <= bound
    colour = "green" if kept else "red"
    console.print(f"  {what}: [{colour}]{ratio:.2f}[/] (bound {bound})", highlight=False)
    return kept


def main() -> int:
    """Both, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", choices=("step", "plan"), help="time this alone")
    parser.add_argument("--rounds", type=int, help="of each measurement")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a bound is not kept")
    given = parser.parse_args()
    rounds = {"rounds": given.rounds} if given.rounds else {}
    kept = True
    if given.only != "plan":
        kept &= step(llama_step.Settings(**rounds))
    if given.only != "step":
        kept &= plan(planning.Settings(**rounds))
    return 0 if kept or not given.strict else 1


if __name__ == "__main__":
    sys.exit(main())
