"""Fewer key/value heads than ranks: the query heads are split all the same."""

from __future__ import annotations

import pytest
import torch
from models import llama_8b
from oracle import assert_sound
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard

SPLIT = "S(1) R R -> S(1) [grouped_queries]"


class GroupedQueries(nn.Module):
    def __init__(self, heads: int, kv_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout, width = dropout, 4 * heads
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, 4 * kv_heads), nn.Linear(width, 4 * kv_heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, None, drop, True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(4, 1, 2), (4, 1, 4), (4, 2, 4), (12, 4, 3), (12, 3, 4)]
)
def test_query_heads_are_split_over_whole_keys(heads: int, kv_heads: int, ranks: int) -> None:
    torch.manual_seed(0)
    asked = {"q.weight": "column", "out.weight": "row", "[kv].weight": "replicated"}
    sharded = assert_sound(
        GroupedQueries(heads, kv_heads), (torch.randn(2, 5, 4 * heads),), ranks=ranks, constraints=asked,
        hardware="h100-sxm",
    )  # fmt: skip
    found = [c.strategy for c in sharded.plan.choices if "attention" in c.key]
    assert found == [SPLIT], found


def test_dropout_leaves_masks_to_each_rank() -> None:
    torch.manual_seed(0)
    model, x = GroupedQueries(4, 1, 0.5), torch.randn(2, 64, 16)
    asked = {"q.weight": "column", "out.weight": "row", "[kv].weight": "replicated"}
    sharded = autoshard.autoshard(model, 4, (x,), constraints=asked, hardware="h100-sxm")
    torch.manual_seed(1)
    first = sharded(x)
    torch.manual_seed(1)
    assert torch.equal(sharded(x), first)
    assert not torch.equal(sharded(x), first)
    assert autoshard.verify(model, 4, (x,), plan=sharded.plan).ok


def test_an_8b_llama_on_more_ranks_than_it_has_key_heads() -> None:
    """8 key/value heads, 16 ranks: Megatron's plan, and the small keys and values gathered."""
    model, kwargs = llama_8b()
    plan = autoshard.plan(model, 16, (), kwargs, hardware="h100-sxm")
    assert [c.strategy for c in plan.choices if "scaled_dot" in c.key] == [SPLIT]
    kinds = {w.fqn.split(".")[-2]: w.split for w in plan.weights if ".layers.0." in w.fqn}
    assert (kinds["q_proj"], kinds["o_proj"]) == ("column", "row")
    reduced = [c for c in plan.collectives if c.kind == "all_reduce" and ".layers." in c.module]
    assert sorted(c.phase for c in reduced) == ["backward", "backward", "forward", "forward"]
