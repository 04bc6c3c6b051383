"""Models that cannot be captured soundly are refused, at the user's line, and with little noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.errors import CaptureError


class Branches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else super().forward(x)


class Selects(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x > 0]


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sum().item()


@pytest.mark.parametrize(
    ("kind", "what", "line"),
    [
        (
            Branches,
            "its path or the shapes of its tensors depend on the values of tensors",
            "x.sum() > 0",
        ),
        (Selects, "The shape of a tensor depends on the data", "[x > 0]"),
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
