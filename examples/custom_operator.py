"""Teach autoshard an operator of one's own.

    python examples/custom_operator.py

An operator without a rule is never an error: it runs whole on every rank, and the report names it. A rule is one line that names the factors of its dimensions, as an einsum does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autoshard

HARDWARE = "cpu-gloo"


# An operator as one would write it for a kernel: its program, its shapes, its gradient.
@torch.library.custom_op("example::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x · gateᵀ) * (x · upᵀ)."""
    return nn.functional.silu(x @ gate.T) * (x @ up.T)


@gated.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], gate.shape[0]))


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        x, gate, up = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        result = nn.functional.silu(x @ gate.T) * (x @ up.T)
        return torch.autograd.grad(result, (x, gate, up), gradient)


gated.register_autograd(_backward, setup_context=_save)


class Gated(nn.Module):
    """The MLP of a Llama, on that operator."""

    def __init__(self, width: int = 256, hidden: int = 1024) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(hidden, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(hidden, width) / width**0.5)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate, multiply, project down."""
        return self.down(torch.ops.example.gated(x, self.gate, self.up))


def main() -> None:
    """Plan without a rule, then with one, and verify it."""
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(16, 64, 256)

    plan = autoshard.plan(model, 2, (x,), hardware=HARDWARE)
    print("without a rule:", splits(plan))
    for fallback in plan.fallbacks:
        print(f"  {fallback.op} runs whole on every rank")

    # `*b` and `h` may be split. `w` is summed over inside a nonlinear operator, so it must stay
    # whole: `·`. Only a plain sum may be split, and then the result is a share of it.
    autoshard.rules.register("example::gated", "x[*b, ·] gate[h, ·] up[h, ·] -> y[*b, h]")

    plan = autoshard.plan(model, 2, (x,), hardware=HARDWARE)
    print("with a rule:   ", splits(plan))

    # A rule is a promise; this is how to check it: outputs, gradients and a step, against the model.
    found = autoshard.verify(model, 2, (x,), hardware="ideal")
    found.report()
    assert found.ok


def splits(plan: autoshard.Plan) -> str:
    """How each weight is split."""
    return ", ".join(f"{weight.fqn} {weight.split}" for weight in plan.weights)


if __name__ == "__main__":
    main()
