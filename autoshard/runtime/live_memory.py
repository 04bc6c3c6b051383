"""Count the bytes of live tensors while a program runs: what a caching allocator would have to hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.compat import TorchDispatchMode, local_tensor, storage_key, tree_flatten


class LiveBytes(TorchDispatchMode):
    """A block in which every operator's results are counted, until their memory is given back.

    Memory is counted by storage: a view, or a tensor that is written to in place, is none of its own.
    What a kernel uses while it runs, and gives back itself, is not seen; nor is what existed before the
    block, unless it is passed to `add`. A `DTensor` is counted by its local tensor.

    Attributes:
        bytes: live now.
        peak_bytes: the most that were live at once.
        device: of the tensors that count; None for all.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.bytes = 0
        self.peak_bytes = 0
        self.device = device
        self._held: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and count its results."""
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a subclass runs operators on the tensors that it holds: those count
        made = func(*args, **(kwargs or {}))
        for item in tree_flatten(made)[0]:
            if isinstance(item, Tensor):
                self.add(item)
        return made

    def add(self, tensor: Tensor) -> None:
        """Count a tensor from now on; one that is counted already is not counted twice."""
        if isinstance(tensor, DTensor):
            tensor = local_tensor(tensor)
        if self.device is not None and tensor.device.type != self.device:
            return
        key = storage_key(tensor)
        if key is None or key in self._held:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()

        def gone(_: object) -> None:
            del self._held[key]
            self.bytes -= size

        self._held[key] = weakref.ref(storage, gone)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)


def peak_bytes(step: Callable[[], Any], tensors: Iterable[Tensor]) -> int:
    """The most bytes that are live at once on this process while `step` runs.

    Args:
        step: what to run. What it keeps from one call to the next (optimizer state) should exist already.
        tensors: what exists before, and counts: parameters, buffers, optimizer state, inputs.
    """
    live = LiveBytes()
    for tensor in tensors:
        live.add(tensor)
    with live:
        step()
    return live.peak_bytes


def held(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Parameters, buffers and optimizer state."""
    yield from module.parameters()
    yield from module.buffers()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
