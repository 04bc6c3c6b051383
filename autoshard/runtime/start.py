"""Run a command on several ranks of this machine, without a launcher."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from autoshard.errors import OptionsError

PATIENCE_S = 3.0
"""How long the other ranks may go on after one has failed."""


def start_ranks(arguments: Sequence[str], ranks: int, environment: Mapping[str, str]) -> int:
    """Run `python -m autoshard` with these arguments on so many ranks; the exit status.

    Each rank is a process with torchrun's variables. Rank 0 writes to this process's own streams; what
    the others write is shown where one of them fails first. None is left behind.

    Args:
        arguments: of the command.
        ranks: how many.
        environment: of this process.
    """
    with tempfile.TemporaryFile() as told:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "autoshard", *arguments],
                env={**environment, **_variables(rank, ranks, environment, port)},
                stdout=told if rank else None,
                stderr=told if rank else None,
            )
            for port in [_free_port()]
            for rank in range(ranks)
        ]
        try:
            first = _wait(processes)
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                processes[0].wait(PATIENCE_S)
            raise
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if first:
            told.seek(0)
            sys.stderr.write(told.read().decode(errors="replace"))
        return next((code for code in (p.returncode for p in processes) if code > 0), int(first))


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Until all are done, or one has failed; whether rank 0 has not told why."""
    while not any(codes := [process.poll() for process in processes]):
        if None not in codes:
            return False
        time.sleep(0.05)
    deadline = time.monotonic() + PATIENCE_S
    while processes[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes[0].poll()


def _variables(rank: int, ranks: int, environment: Mapping[str, str], port: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(threads)),
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def started_group(environment: Mapping[str, str]) -> Iterator[int]:
    """A process group over all ranks of torchrun or `start_ranks` while inside; gives this rank.

    It is NCCL's (or that of the accelerator) where each rank has an accelerator of its own, else
    gloo's. Without such variables there is no group, and the rank is 0.
    """
    if "WORLD_SIZE" not in environment:
        yield 0
        return
    try:
        local, rank = (int(environment.get(name, "0")) for name in ("LOCAL_RANK", "RANK"))
        here = int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]))
    except ValueError as error:
        raise OptionsError(f"The launcher's variables are no numbers: {error}.") from None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.device_count() >= here:
        torch.accelerator.set_device_index(local)
        dist.init_process_group(dist.get_default_backend_for_device(accelerator.type))
    else:
        dist.init_process_group("gloo")
    try:
        yield rank
    finally:
        dist.destroy_process_group()
