"""Greedy decoding with the vocabulary split: the ranks' best words travel, never the logits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from oracle import IDEAL_TENSOR
from processes import run_ranks
from torch import Tensor, nn

import autoshard


class Greedy(nn.Module):
    """The most likely word after each; words 3 and 70 are equally likely everywhere."""

    def __init__(self, vocabulary: int = 97) -> None:
        super().__init__()
        self.head = nn.Linear(8, vocabulary)
        with torch.no_grad():
            self.head.weight[70] = self.head.weight[3]
            self.head.bias[3] = self.head.bias[70] = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).argmax(-1)


def _made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Greedy(), torch.randn(2, 5, 8)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_best_word_is_found(ranks: int) -> None:
    model, x = _made()
    asked = {"head.weight": "column"}
    sharded = autoshard.autoshard(
        copy.deepcopy(model), ranks, (x,), constraints=asked, mode="infer", **IDEAL_TENSOR
    )
    assert torch.equal(sharded(x), model(x))
    assert 3 in model(x)
    kinds = [(c.kind, c.bytes) for c in sharded.plan.collectives]
    assert kinds == [("all_gather", 10 * 4 * ranks), ("all_gather", 10 * 8 * ranks)]


def on_gloo() -> bool:
    model, x = _made()
    asked = {"head.weight": "column"}
    sharded = autoshard.autoshard(
        copy.deepcopy(model), dist.get_world_size(), (x,), constraints=asked, mode="infer", **IDEAL_TENSOR
    )  # fmt: skip
    return torch.equal(sharded(x), model(x))


@pytest.mark.gloo
def test_on_two_processes() -> None:
    assert run_ranks(on_gloo, 2) == [True, True]
