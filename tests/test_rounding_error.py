"""A norm of single elements gives the rounding error of what it is given: no split would repeat it."""

from __future__ import annotations

import pytest
import torch
from oracle import IDEAL_ALL, IDEAL_TENSOR, assert_sound
from torch import nn

import autoshard


class Normalised(nn.Module):
    """A norm of groups of one element, whose sign a ReLU then reads."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 32)
        self.norm, self.out = norm, nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.relu(self.up(x)))
        if isinstance(self.norm, nn.LayerNorm):
            return self.out(torch.relu(self.norm(x.unsqueeze(-1))).squeeze(-1))
        return self.out(torch.relu(self.norm(x)))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [IDEAL_TENSOR, IDEAL_ALL], ids=["tensor", "all"])
@pytest.mark.parametrize("norm", [nn.GroupNorm(32, 32), nn.LayerNorm(1)], ids=["group", "layer"])
def test_a_norm_of_single_elements(norm: nn.Module, ranks: int, options: dict[str, str]) -> None:
    model, given = Normalised(norm), (torch.randn(8, 16),)
    assert_sound(model, given, ranks=ranks, **options)
    plan = autoshard.plan(model, ranks, given, **options)
    assert all(weight.split == "replicated" for weight in plan.weights)
    assert "rounding error" in plan.weights[0].reason
    assert any("normalises single elements" in note for note in plan.notes)


def test_a_norm_of_more_elements_is_no_noise() -> None:
    model, given = Normalised(nn.GroupNorm(16, 32)), (torch.randn(8, 16),)
    plan = autoshard.plan(model, 2, given, **IDEAL_TENSOR)
    assert any(weight.split != "replicated" for weight in plan.weights)
