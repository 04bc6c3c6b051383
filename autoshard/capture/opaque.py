"""Operators made while capturing, of whole pieces of a model: run as they are, and again for the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from autoshard.compat import tree_flatten

_libraries: dict[str, torch.library.Library] = {}


class Body(Protocol):
    """What an operator runs. `random_state` is the operator's to keep."""

    random_state: Any

    def call(self, tensors: list[Tensor]) -> Any:
        """Run it, with gradients where they are on."""
        ...

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run it without gradients, for tensors in memory of their own."""
        ...

    def trace(self, tensors: list[Tensor]) -> list[Tensor]:
        """As `run`, on tensors without data."""
        ...


def define(namespace: str, name: str, body: Body) -> Any:
    """The operator `namespace::name` that runs a body, and for its backward runs it again."""
    full = f"{namespace}::{name}"
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"{name}(Tensor[] xs) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))

    def forward(xs: list[Tensor]) -> list[Tensor]:
        body.random_state = _random_state(xs)
        return body.run(xs)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[0])
        ctx.random_state = body.random_state

    def backward(ctx: Any, gradients: list[Tensor | None]) -> Any:
        wanted = ctx.needs_input_grad[0]
        with torch.enable_grad(), _drawn_again(ctx.random_state):
            xs = [
                x.detach().requires_grad_(need)
                for x, need in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            made = tree_flatten(body.call(xs))[0]
        pairs = [
            (y, g)
            for y, g in zip(made, gradients, strict=True)
            if y.requires_grad and g is not None
        ]
        asked = [x for x, need in zip(xs, wanted, strict=True) if need]
        if not pairs or not asked:
            return [None] * len(xs)
        ys, gs = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, asked, gs, allow_unused=True))
        return [next(found) if need else None for need in wanted]

    torch.library.impl(full, "CompositeExplicitAutograd", forward, lib=library)
    torch.library.register_fake(full, body.trace, lib=library)
    torch.library.register_autograd(full, backward, setup_context=setup_context, lib=library)
    return getattr(getattr(torch.ops, namespace), name).default


def _random_state(xs: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    device = next((x.device for x in xs if x.device.type == "cuda"), None)
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device else None


@contextmanager
def _drawn_again(state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """A block in which random numbers are those drawn since `state`."""
    with torch.random.fork_rng():
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1])
        yield
