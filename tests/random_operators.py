"""Custom operators without rules: functional, writing, viewing, random, with several results.

`autoshard` has never heard of them, so it must run them whole, and name them in `plan.fallbacks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAMESPACE = "random_graphs"


def _mix(x: Tensor, y: Tensor) -> Tensor:
    """Looks along every dimension: no slice of it is the result of slices."""
    return x - x.mean() + x.flip(-1) * y.cumsum(-1).sin()


def _mix_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _mix_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    with torch.enable_grad():
        a, b = x.detach().requires_grad_(), y.detach().requires_grad_()
        made = torch.autograd.grad(_mix(a, b), (a, b), grad)
    return made[0], made[1]


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.cumsum(0) * 0.5, x.amax(-1).clone()


def _halves_backward(ctx: Any, grad: Tensor, top: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    with torch.enable_grad():
        a = x.detach().requires_grad_()
        made = torch.autograd.grad(_halves(a), a, (grad, top))
    return made[0]


def _ramp(x: Tensor) -> Tensor:
    """Writes to its operand."""
    return x.add_(torch.arange(x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape) * 0.01)


def _record(state: Tensor, x: Tensor) -> None:
    """Writes to its first operand, and returns nothing."""
    state.mul_(0.5).add_(x.mean())


def _turned(x: Tensor) -> Tensor:
    """A view."""
    return x.transpose(0, -1)


def _noise(x: Tensor) -> Tensor:
    """Random: the same on every rank where the generators are, however x lies in memory."""
    return torch.rand_like(x, memory_format=torch.contiguous_format)


def _define() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    library.define("mix(Tensor x, Tensor y) -> Tensor")
    library.define("halves(Tensor x) -> (Tensor, Tensor)")
    library.define("ramp_(Tensor(a!) x) -> Tensor(a!)")
    library.define("record(Tensor(a!) state, Tensor x) -> ()")
    library.define("turned(Tensor(a) x) -> Tensor(a)")
    library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    for name, function in {
        "mix": _mix, "halves": _halves, "noise": _noise, "record": _record, "ramp_": _ramp, "turned": _turned,
    }.items():  # fmt: skip
        library.impl(name, function, "CompositeExplicitAutograd")
    return library


_LIBRARY = _define()
torch.library.register_autograd(
    f"{NAMESPACE}::mix", _mix_backward, setup_context=_mix_setup, lib=_LIBRARY
)
torch.library.register_autograd(
    f"{NAMESPACE}::halves",
    _halves_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=_LIBRARY,
)
torch.library.register_fake(f"{NAMESPACE}::mix", lambda x, y: torch.empty_like(x + y), lib=_LIBRARY)
torch.library.register_fake(
    f"{NAMESPACE}::halves",
    lambda x: (torch.empty_like(x), x.new_empty(x.shape[:-1])),
    lib=_LIBRARY,
)
