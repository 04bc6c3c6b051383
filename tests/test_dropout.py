"""Dropout: one mask on replicas, a mask of its own on each shard, the same again from a seed."""

from __future__ import annotations

import math

import pytest
import torch
from processes import run_ranks
from torch import nn
from torch.nn import functional as F

import autoshard

P = 0.3
WIDTH, ROWS = 64, 512


class Dropped(nn.Module):
    """Ones through a product of ones: what dropout leaves is 1 / (1 − p), and its mask is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1, WIDTH, bias=False)
        nn.init.ones_(self.up.weight)

    def forward(self, x):
        return F.dropout(self.up(x), P, training=True)


def built(ranks: int, split: str):
    """The sharded model; on links that cost something nothing is split that need not be."""
    x, hardware = torch.ones(ROWS, 1), "ideal" if split == "column" else "h100-sxm"
    constraints = {"up.weight": split}
    return autoshard.autoshard(
        Dropped(), ranks, (x,), hardware=hardware, constraints=constraints
    ), x


def mask(sharded, x: torch.Tensor, seed: int) -> torch.Tensor:
    """What is kept, as truth values."""
    torch.manual_seed(seed)
    out = sharded(x).detach()
    assert torch.all((out == 0) | torch.isclose(out, torch.tensor(1 / (1 - P))))
    return out != 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_drop_alike_and_as_the_whole_model_does(ranks: int) -> None:
    sharded, x = built(ranks, "replicated")
    assert not any("split_dropout" in str(n.target) for n in sharded.graph_module.graph.nodes)
    model = Dropped()
    torch.manual_seed(5)
    alone = model(x) != 0
    assert torch.equal(mask(sharded, x, 5), alone)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_drop_each_in_its_own_way(ranks: int) -> None:
    sharded, x = built(ranks, "column")
    assert any("split_dropout" in str(n.target) for n in sharded.graph_module.graph.nodes)
    shards = mask(sharded, x, 5).chunk(ranks, 1)
    count = shards[0].numel()
    for i in range(ranks):
        for j in range(i):
            agree = (shards[i] == shards[j]).double().mean().item()
            expected = P**2 + (1 - P) ** 2  # of masks that know nothing of each other
            assert abs(agree - expected) < 5 * math.sqrt(expected * (1 - expected) / count)


@pytest.mark.parametrize("split", ["column", "replicated"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_seed_gives_the_same_masks_again_and_another_seed_others(ranks: int, split: str) -> None:
    sharded, x = built(ranks, split)
    first = mask(sharded, x, 5)
    assert torch.equal(first, mask(sharded, x, 5))
    assert not torch.equal(first, mask(sharded, x, 6))
    torch.manual_seed(5)
    one, two = sharded(x), sharded(x)
    assert torch.equal(one != 0, first)
    assert not torch.equal(one, two)  # a step does not repeat the last one's masks


@pytest.mark.parametrize("split", ["column", "replicated"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_share_of_p_is_dropped_in_every_shard_row_and_column(ranks: int, split: str) -> None:
    sharded, x = built(ranks, split)
    kept = torch.stack([mask(sharded, x, seed) for seed in range(8)]).double()
    assert abs(kept.mean().item() - (1 - P)) < 5 * math.sqrt(P * (1 - P) / kept.numel())
    for shard in kept.chunk(ranks, -1):
        bound = 5 * math.sqrt(P * (1 - P) / shard.numel())
        assert abs(shard.mean().item() - (1 - P)) < bound
    for dim in (1, 2):  # rows of the batch, and features
        means = kept.mean(dim=tuple(d for d in range(3) if d != dim))
        bound = 6 * math.sqrt(P * (1 - P) * means.numel() / kept.numel())
        assert (means - (1 - P)).abs().max().item() < bound


@pytest.mark.parametrize("split", ["column", "replicated"])
def test_backward_drops_what_forward_dropped(split: str) -> None:
    sharded, x = built(2, split)
    torch.manual_seed(5)
    out = sharded(x)
    out.sum().backward()
    weight = next(p for name, p in sharded.named_parameters() if name == "up.weight")
    assert torch.allclose(weight.grad[:, 0], out.detach().sum(0))


def _on_gloo(split: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On one rank: the whole result of a seed twice, and of another one."""
    sharded, x = built(2, split)
    return mask(sharded, x, 5), mask(sharded, x, 5), mask(sharded, x, 6)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("split", ["column", "replicated"])
def test_processes_drop_as_the_simulator_does(split: str) -> None:
    results = run_ranks(_on_gloo, 2, split)
    simulated, x = built(2, split)
    here = mask(simulated, x, 5)
    for first, again, other in results:
        assert torch.equal(first, here)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
