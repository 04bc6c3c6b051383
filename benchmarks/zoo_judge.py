"""Does a sharded model compute what the unsharded one does? With what rounding does to each gradient as the yardstick.

A bound relative to each gradient alone says WRONG of gradients that are zero in exact arithmetic, such as that of the bias
of an attention's keys: what is computed is rounding noise, and a sum in another order gives other noise. A bound relative to
the largest gradient of the model lets real faults in small gradients pass. So the noise is measured: the unsharded
model runs again with the result of every operator, forward and backward, moved by up to one unit in the last place of
its own type (Monte Carlo arithmetic: D. S. Parker, 1997), and what an output or a gradient then differs by is its noise.
A sum over ranks that is left out is as large as what it should have summed, and stays WRONG.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative differences that count as none, whatever the noise."""
NOISES = 64.0
"""As many times its noise may a value differ: the noise is the largest of two draws, and ranks add in other orders."""
UNSTABLE = 1e-2
"""A value of which rounding alone changes this share has no bound: a router's tie that falls the other way, say."""


@dataclass(frozen=True)
class Run:
    """One step: every floating output, and every parameter's gradient (zeros where there is none)."""

    values: Mapping[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """`sound`, `WRONG`, or `unstable`, where values differ and rounding alone makes them differ.

    Then the value that is farthest beyond its bound, its relative error, and what rounding makes of it.
    """

    status: str
    worst: str = ""
    error: float = 0.0
    noise: float = 0.0


class _Rounding(TorchDispatchMode):
    """Every floating result that is new memory is moved by up to one unit in the last place; whole numbers are left."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(r.alias_info is not None for r in func._schema.returns):  # noqa: SLF001 - of the operator
            return out
        return tree_map(self._moved, out)

    def _moved(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return x
        info = torch.finfo(x.dtype)
        signs = torch.rand(x.shape, generator=self.random, dtype=torch.float32) * 2 - 1
        moves = (x != x.round()) & (x.abs() < info.max / 2)
        return torch.where(moves, x * (1 + info.eps * signs.to(x.dtype)), x)


def step(model: nn.Module, kwargs: Mapping[str, Any]) -> Run:
    """Forward and backward of a copy-free step: the gradients of `model` are set to nothing before."""
    model.zero_grad(set_to_none=True)
    out = leaves(model(**copy.deepcopy(dict(kwargs))))
    loss = loss_of(out)
    if loss.requires_grad:
        loss.backward()
    values = {f"output {i}": x.detach() for i, x in enumerate(out) if x.is_floating_point()}
    for name, p in model.named_parameters(remove_duplicate=False):
        values[name] = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
    return Run(values)


def rounded(model: nn.Module, kwargs: Mapping[str, Any], seed: int) -> Run:
    """The step with every operator's result moved by up to its last place."""
    with _whole_attention(), _Rounding(seed):
        return step(model, kwargs)


def noise_of(wanted: Run, draws: list[Run]) -> dict[str, float]:
    """The largest difference that rounding makes, by value."""
    return {n: max(_apart(d.values[n], x) for d in draws) for n, x in wanted.values.items()}


def judge(found: Run, wanted: Run, noise: Mapping[str, float]) -> Verdict:
    """Compare value by value; the worst is the one farthest beyond what is allowed for it."""
    odd = sorted(set(found.values) ^ set(wanted.values))
    if odd:
        return Verdict("WRONG", f"{odd[0]} is in one of them only", float("inf"))
    largest = max(map(_size, wanted.values.values()), default=0.0)
    verdicts, worst = [Verdict("sound")], -1.0
    for name, x in wanted.values.items():
        apart, size = _apart(found.values[name], x), _size(x)
        allowed = EXACT.get(x.dtype, 1e-4) * size
        # what is all noise may be as large as a thousandth of the largest value, and still be noise
        if NOISES * noise[name] <= UNSTABLE * max(size, 1e-3 * largest):
            allowed = max(allowed, NOISES * noise[name])
            status = "sound" if apart <= allowed else "WRONG"
        else:
            status = "sound" if apart <= allowed else "unstable"
        beyond = apart / allowed if allowed else float(apart > 0)
        verdict = Verdict(status, name, apart / (size or 1.0), noise[name] / (size or 1.0))
        if status != "sound" or beyond > worst:
            verdicts.append(verdict)
            worst = max(worst, beyond)
    order = ("sound", "unstable", "WRONG")
    return max(reversed(verdicts), key=lambda v: order.index(v.status))


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs().double()).max()) if b.numel() else 0.0


def _size(x: Tensor) -> float:
    finite = torch.where(x.isfinite(), x, 0.0)
    return float(finite.abs().max()) if x.numel() else 0.0


def leaves(out: Any) -> list[Tensor]:
    """The tensors of an output, those within mappings that torch doesn't know as trees too."""
    found: list[Tensor] = []
    for x in tree_leaves(out):
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, Mapping):
            found += leaves(list(x.values()))
    return found


def loss_of(out: list[Tensor]) -> Tensor:
    """A sum that weighs every element of every output differently."""
    total = torch.zeros((), dtype=torch.float64)
    for index, x in enumerate(out):
        if x.is_floating_point() and x.requires_grad and x.numel():
            random = torch.Generator().manual_seed(index)
            weights = torch.rand(x.shape, generator=random, dtype=torch.float64)
            total = total + (x.double() * weights).sum() / x.numel() ** 0.5
    return total


@contextmanager
def _whole_attention() -> Iterator[None]:
    """Attention by its parts: of the fused kernel's result not every rounding inside could be moved."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
