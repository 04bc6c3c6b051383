"""Timing on every rank at once: what a step sees, where ranks share cores, memory and links."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Stopwatch:
    """Times a function that all ranks run together.

    A block is as many runs as fill `block_s`; its time is the mean over runs and over ranks, and the
    median of the blocks is taken. Ranks that share cores take turns of milliseconds: one run alone
    would be timed while the others wait, or wait itself.

    Attributes:
        device: what runs.
        block_s: how long a block is.
        blocks: how many.
        world: whether there is a process group.
    """

    device: torch.device
    block_s: float = 0.04
    blocks: int = 5
    world: bool = False

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds that one run takes; the same on every rank."""
        run()
        self._block(run, 1)
        first = self._mean(self._block(run, 2))
        repeats = max(1, min(20_000, round(self.block_s / max(first, 1e-7))))
        return statistics.median(self._mean(self._block(run, repeats)) for _ in range(self.blocks))

    def _block(self, run: Callable[[], object], repeats: int) -> float:
        if self.world:
            dist.barrier()
        self._synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        self._synchronize()
        return (time.perf_counter() - started) / repeats

    def _mean(self, seconds: float) -> float:
        """Averaged over the ranks, so that all of them decide alike."""
        if not self.world:
            return seconds
        total = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
