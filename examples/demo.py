"""What `make demo` runs: plan an 8B model for 8 GPUs, then train a small one on 2 processes.

It needs no GPU. The 8B Llama is on the meta device, where tensors have shapes and no values; planning
needs nothing more. The small Llama is real: two processes, talking over gloo, train their shares of it
beside an unsharded twin on the same data, and the losses are printed side by side.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llama
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import autoshard

RANKS, STEPS = 2, 20
HARDWARE = "cpu-gloo"  # links as slow as gloo, cores as slow as these
PATIENCE_S = 120.0


def main() -> None:
    """Plan, verify, train."""
    parser = argparse.ArgumentParser(
        description="What autoshard does, in two minutes on two cores."
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of training; default %(default)s")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    console = Console()
    console.rule("[bold]1 · plan Llama 3 8B for 8 H100s, on this machine")
    plan_8b(console)
    console.rule("[bold]2 · verify a small Llama on 4 simulated ranks")
    verify_small(console)
    console.rule(f"[bold]3 · train it on {RANKS} processes, beside the unsharded model")
    train_small(console, steps)


# --- 1: plan ------------------------------------------------------------------------------------


def plan_8b(console: Console) -> None:
    """The plan of an 8-billion-parameter model, from shapes alone."""
    model, args, kwargs = llama.llama_8b()
    with stages(console) as progress:
        plan = autoshard.plan(
            model, world_size=8, args=args, kwargs=kwargs, hardware="h100-sxm", progress=progress
        )
    plan.report(console)


# --- 2: verify ----------------------------------------------------------------------------------


def verify_small(console: Console) -> None:
    """Outputs, every gradient and the parameters after a step, sharded against unsharded.

    The profile "ideal" makes links free, so that whatever can be split is, whether it pays or not.
    """
    model, args, kwargs = llama.factory()
    with console.status("computing both in float64 …"):
        found = autoshard.verify(model, 4, args, kwargs, hardware="ideal")
    found.report(console)


# --- 3: train -----------------------------------------------------------------------------------


def train_small(console: Console, steps: int) -> None:
    """Two processes train the sharded model, this one the unsharded; a row a step."""
    model, _, _ = llama.factory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    console.print(f"{RANKS} processes start; each captures the model, plans, and keeps its part …")
    table = Table("step", "loss, unsharded", f"loss, {RANKS} ranks", "difference", box=None)
    with ranks_at_work(steps) as losses, Live(table, console=console):
        for step in range(steps):
            whole = train_step(model, optimizer, llama.batch(step))
            sharded = losses.get(timeout=PATIENCE_S)
            table.add_row(
                str(step), f"{whole:.6f}", f"{sharded:.6f}", f"{abs(whole - sharded):.1e}"
            )
    console.print(
        "\nThe losses differ by no more than rounding: sums of float32 are taken in another order. "
        "Each rank ran plain autograd and AdamW on its own part of the weights."
    )


def train_rank(rank: int, store: str, steps: int, losses: Any) -> None:
    """One process: the same model and the same data on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model, args, kwargs = llama.factory()
    model = autoshard.autoshard(model, RANKS, args, kwargs, hardware=HARDWARE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss = train_step(model, optimizer, llama.batch(step))
        if rank == 0:
            losses.put(loss)
    dist.barrier()
    dist.destroy_process_group()


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    """One step of an ordinary training loop: sharded or not, it is the same code."""
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


# --- what they share ----------------------------------------------------------------------------


@contextmanager
def ranks_at_work(steps: int) -> Iterator[mp.Queue]:
    """Start a process for each rank; gives the queue that rank 0 puts its losses in."""
    context = mp.get_context("spawn")
    losses = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(train_rank, (f"{folder}/store", steps, losses), nprocs=RANKS, join=False)
        try:
            yield losses
        except queue.Empty:
            ranks.join(timeout=0)  # raises what a rank raised
            raise
        finally:
            for process in ranks.processes:
                process.join(PATIENCE_S)
                process.kill()


@contextmanager
def stages(console: Console) -> Iterator[Callable[[str], None]]:
    """A function for `progress=`: it shows each stage as it runs, and how long it took."""
    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:

        def finish() -> None:
            for task in progress.task_ids:
                progress.update(task, total=1, completed=1)

        def begin(stage: str) -> None:
            finish()
            progress.add_task(stage, total=None)

        yield begin
        finish()


if __name__ == "__main__":
    main()
