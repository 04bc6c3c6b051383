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


class MasksInPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y[y > 0] *= 2
        return y


class Counts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.bincount(x.abs().long()[0], minlength=4)


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
        (MasksInPlace, "The shape of a tensor depends on the data", "y[y > 0] *= 2"),
        (Counts, "The shape of a tensor depends on the data", "torch.bincount"),
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


def test_what_a_layer_of_torch_does_is_refused_at_its_line() -> None:
    """Without a momentum, batch norm averages over a count that it reads from a buffer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(CaptureError) as caught:
        autoshard.plan(model, 2, (torch.randn(4, 4),))
    assert "depend on the values" in caught.value.what
    assert "batchnorm.py" in caught.value.where
    assert "num_batches_tracked" in caught.value.where


def test_a_loss_whose_shapes_depend_on_lengths_is_refused() -> None:
    class Speech(nn.Linear):
        def forward(self, x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
            y = super().forward(x).log_softmax(-1)
            return nn.functional.ctc_loss(y, targets, lengths, lengths // 2)

    args = torch.randn(6, 2, 4), torch.ones(2, 3, dtype=torch.long), torch.tensor([6, 4])
    with pytest.raises(CaptureError) as caught:
        autoshard.plan(Speech(4, 4), 2, args)
    assert "depend on the values" in caught.value.what
    assert "ctc_loss" in caught.value.where


def test_a_view_whose_size_is_read_from_a_tensor_is_refused_at_its_line() -> None:
    class Repeated(nn.Linear):
        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            return super().forward(x[:1].expand(counts[0].item(), 4))

    with pytest.raises(CaptureError) as caught:
        autoshard.plan(Repeated(4, 4), 2, (torch.randn(3, 4), torch.tensor([5, 6])))
    assert "read from a tensor" in caught.value.what
    assert "counts[0].item()" in caught.value.where
