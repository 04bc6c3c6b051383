"""Losses on which tensor-parallel tools go wrong: of classes that are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import assert_sound
from pinned import pinned_plan
from pitfall_models import BOTH, RANKS, Loss
from torch import Tensor, nn
from torch.nn import functional as F


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "ignored": {"ignore_index": 3},
    "ignored and smoothed": {"ignore_index": 3, "label_smoothing": 0.2},
    "negative ignored": {"ignore_index": -100},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none", "label_smoothing": 0.1},
    "weighted": {"weight": torch.rand(24, dtype=torch.float64)},
    "weighted and smoothed": {
        "weight": torch.rand(24, dtype=torch.float64),
        "label_smoothing": 0.1,
    },
}


@RANKS
@BOTH
@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy(name: str, ranks: int, options: dict[str, str]) -> None:
    target = torch.randint(0, 24, (12,))
    target[:3] = 3
    if name == "negative ignored":
        target[5:7] = -100
    sharded = assert_sound(
        Loss(24, **LOSSES[name]), (torch.randn(12, 12), target), ranks=ranks, **options
    )
    if options["search"] == "tensor" and "weighted" not in name:
        assert "[vocab_cross_entropy]" in " ".join(c.strategy for c in sharded.plan.choices)


OF_CLASSES = {
    "smoothed": {"label_smoothing": 0.1},
    "ignored": {"ignore_index": 3, "label_smoothing": 0.2},
    "ignored, sum": {"ignore_index": 3, "reduction": "sum"},
    "ignored, none": {"ignore_index": 3, "label_smoothing": 0.1, "reduction": "none"},
    "all ignored but one": {"ignore_index": 3},
    "probabilities": {},
    "probabilities, smoothed": {"label_smoothing": 0.1},
    "probabilities, sum": {"label_smoothing": 0.1, "reduction": "sum"},
    "probabilities, none": {"reduction": "none"},
}


@RANKS
@pytest.mark.parametrize("classes", [24, 23])
@pytest.mark.parametrize("name", OF_CLASSES)
def test_cross_entropy_with_classes_split(name: str, classes: int, ranks: int) -> None:
    """Each rank has logits of its own classes, and the labels of all."""
    model, target = Loss(classes, **OF_CLASSES[name]), torch.randint(0, classes, (12,))
    target[:3] = 3
    if name.startswith("all"):
        target[1:] = 3
    if name.startswith("prob"):
        target = torch.rand(12, classes).softmax(-1)
    labels = "S(1)" if target.is_floating_point() else "I"
    given, made = (torch.randn(12, 12), target), f"S(1) {labels} -> I [vocab_cross_entropy]"
    plan = pinned_plan(model, given, ranks, {"cross_entropy": made}, {"head.weight": "column"})
    assert_sound(model, given, ranks=ranks, plan=plan)


@RANKS
@BOTH
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_class_probabilities(
    ranks: int, smoothing: float, options: dict[str, str]
) -> None:
    target = torch.rand(12, 24).softmax(-1)
    assert_sound(
        Loss(24, label_smoothing=smoothing), (torch.randn(12, 12), target), ranks=ranks, **options
    )


class LossOverSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(6, 12, 1)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = self.head(x)
        some = F.cross_entropy(logits, target, ignore_index=2)
        return some, F.nll_loss(logits.log_softmax(1), target), F.kl_div(logits.log_softmax(1), logits.detach().softmax(1).roll(1, 1), reduction="batchmean")  # fmt: skip


@RANKS
@BOTH
def test_cross_entropy_over_space(ranks: int, options: dict[str, str]) -> None:
    target = torch.randint(0, 12, (4, 3, 3))
    assert_sound(LossOverSpace(), (torch.randn(4, 6, 3, 3), target), ranks=ranks, **options)


class OtherLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 24)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = self.head(x)
        p, q = z.sigmoid(), y.sigmoid()
        return (
            F.mse_loss(z, y), F.l1_loss(z, y, reduction="sum"), F.smooth_l1_loss(z, y), F.huber_loss(z, y, delta=0.5),
            F.binary_cross_entropy(p, q), F.binary_cross_entropy_with_logits(z, q), F.cosine_similarity(z, y).mean(),
            F.mse_loss(z, y, reduction="none").mean(0), F.soft_margin_loss(z, y.sign()),
            F.triplet_margin_loss(z, y, y.flip(0)), F.poisson_nll_loss(z, q),
        )  # fmt: skip


@RANKS
@BOTH
def test_other_losses(ranks: int, options: dict[str, str]) -> None:
    assert_sound(OtherLosses(), (torch.randn(12, 12), torch.randn(12, 24)), ranks=ranks, **options)
