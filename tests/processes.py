"""Run a function on every rank of a gloo process group, each rank a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed.tensor", "transformers.models.llama", "autoshard.api"]
"""Imported once, in the server that ranks are forked from: a rank then starts in milliseconds."""


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Call `function(*args)` on `size` ranks with a gloo group over all of them; what each returned.

    `function` is a module's own, so that it can be pickled. Warnings are errors, as in the tests.

    Raises:
        AssertionError: a rank raised, died, or took longer than `timeout_s`; it holds the traceback of
            every rank that failed. No process is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank, args=(function, rank, size, folder, timeout_s, args), daemon=True
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, folder, timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return _results(processes, Path(folder), timeout_s)


def _wait(processes: list[Any], folder: str, timeout_s: float) -> None:
    """Until all are done, one has failed (and the others had a moment to fail too), or time is up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if all(process.exitcode is not None for process in processes):
            return
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + 2.0)
        time.sleep(0.02)


def _results(processes: list[Any], folder: Path, timeout_s: float) -> list[Any]:
    import torch

    failures = []
    for rank, process in enumerate(processes):
        error = folder / f"{rank}.error"
        if error.exists():
            failures.append(f"--- rank {rank} raised:\n{error.read_text()}")
        elif not (folder / f"{rank}.result").exists():
            killed = process.exitcode == -signal.SIGKILL
            why = (
                f"did not finish in {timeout_s:g} s, or waited for a failed rank"
                if killed
                else f"exited with status {process.exitcode}"
            )
            failures.append(f"--- rank {rank} {why}")
    if failures:
        raise AssertionError("\n".join(failures))
    return [
        torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(len(processes))
    ]


def _rank(
    function: Callable[..., Any],
    rank: int,
    size: int,
    folder: str,
    timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(f"{folder}/store", size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
            result = function(*args)
            torch.save(result, f"{folder}/{rank}.result")
            dist.barrier()  # nobody leaves while another may still be talking to it
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - told to the parent, whatever it is
        Path(f"{folder}/{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
