"""Models that cannot be captured soundly are refused, at the user's line, and with little noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.errors import CaptureError


class Doubled(torch.autograd.Function):
    """Its backward is not the derivative of its forward: lost, it would be missed."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 7 * gradient


class WithFunction(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(super().forward(x))


class Reentrant(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Branches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else super().forward(x)


class Selects(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x > 0]


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sum().item()


class Autocast(nn.Linear):
    enabled = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            y = x @ self.weight.T
        return y.to(x.dtype)


class NoAutocast(Autocast):
    enabled = False


@pytest.mark.parametrize(
    ("kind", "what", "line"),
    [
        (Autocast, "A part of the model runs under torch.autocast", "x @ self.weight.T"),
        (
            WithFunction,
            "the backward of Doubled, an autograd.Function, would be lost",
            "Doubled.apply",
        ),
        (Branches, "the program's path or shapes depend on the values of tensors", "x.sum() > 0"),
        (Selects, "A tensor's shape depends on the values of another", "[x > 0]"),
        (Reads, "A Python number is read from a tensor", "x.sum().item()"),
    ],
)
def test_what_would_be_wrong_is_refused_at_its_line(kind, what, line, capfd):
    with pytest.raises(CaptureError) as caught:
        autoshard.plan(kind(4, 4), 2, (torch.randn(4, 4),))
    assert what in caught.value.what
    assert "test_capture_refusals.py" in caught.value.where
    assert line in caught.value.where
    assert caught.value.fix
    assert capfd.readouterr() == ("", "")


def test_reentrant_checkpoints_are_refused():
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(CaptureError, match="CheckpointFunction"):
        autoshard.plan(Reentrant(4, 4), 2, (x,))


def test_a_function_without_a_gradient_is_captured():
    model = WithFunction(4, 4).requires_grad_(False)
    found = autoshard.verify(model, 2, (torch.randn(4, 4),), hardware="ideal")
    assert found.ok


def test_autocast_that_is_switched_off_is_laid_open():
    assert autoshard.verify(NoAutocast(4, 4), 2, (torch.randn(4, 4),), hardware="ideal").ok


def test_functions_of_torch_are_back_as_they_were():
    before = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(CaptureError):
        autoshard.plan(WithFunction(4, 4), 2, (torch.randn(4, 4),))
    assert torch.autograd.Function.__dict__["apply"] is before
