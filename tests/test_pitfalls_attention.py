"""Attention on which tensor-parallel tools go wrong: fused weights, heads, rotary tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import H100, IDEAL_ALL, IDEAL_TENSOR, assert_sound, placements, split_share, splits
from pinned import pinned_plan
from pitfall_models import (
    BOTH,
    RANKS,
    ChunkedThenHeads,
    FusedQkv,
    GroupedQueries,
    Heads,
    HeadsOutside,
    NormOfEachHead,
    PerHead,
    Rotary,
    TwoBranches,
    kinds,
)
from torch import Tensor, nn

import autoshard


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class SplitIntoSizes(FusedQkv):
    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        width = x.shape[-1] // 3
        return tuple(self.per_head(part) for part in x.split([width, width, width], dim=-1))


class ViewedThreeOutside(FusedQkv):
    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        cut = x.view(x.shape[0], x.shape[1], 3, self.heads, self.size)
        return cut.permute(2, 0, 3, 1, 4).unbind(0)


class SlicedByHand(FusedQkv):
    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        width = x.shape[-1] // 3
        parts = x[..., :width], x[..., width : 2 * width], x[..., 2 * width :]
        return tuple(map(self.per_head, parts))


@RANKS
@BOTH
@pytest.mark.parametrize(
    "kind", [ChunkedThenHeads, SplitIntoSizes, ViewedThreeOutside, SlicedByHand, HeadsOutside]
)
def test_fused_qkv(kind: type[FusedQkv], ranks: int, options: dict[str, str]) -> None:
    assert_sound(kind(), (torch.randn(2, 5, 24),), ranks=ranks, **options)


@RANKS
@pytest.mark.parametrize("kind", [ChunkedThenHeads, SplitIntoSizes, ViewedThreeOutside])
def test_fused_qkv_is_cut_in_three_blocks_and_not_gathered(
    kind: type[FusedQkv], ranks: int
) -> None:
    sharded = assert_sound(kind(), (torch.randn(2, 5, 24),), ranks=ranks)
    where = placements(sharded.plan)
    assert where["qkv.weight"] == "S(0,3)"
    assert where["out.weight"] == "S(1)"
    assert "all_to_all" not in kinds(sharded)
    # Where links cost something, nothing is left but the one sum that no plan can do without.
    asked = {"qkv.weight": "shard(0,3)"}
    sharded = assert_sound(kind(), (torch.randn(2, 5, 24),), ranks=ranks, constraints=asked, **H100)
    assert kinds(sharded) == ["all_reduce"]


def test_fused_qkv_keeps_the_order_of_its_weight() -> None:
    model, x = ChunkedThenHeads(), torch.randn(2, 5, 24)
    sharded = autoshard.autoshard(model, 2, (x,), **IDEAL_TENSOR)
    assert placements(sharded.plan)["qkv.weight"] == "S(0,3)"
    for state in (sharded.state_dict(), sharded.full_state_dict()):
        assert torch.equal(state["qkv.weight"], model.qkv.weight)


@RANKS
def test_fused_qkv_unflattened_into_heads_and_unbound_is_cut_plainly(ranks: int) -> None:
    """The name, the shape and the layers of the first pattern: its layout is the graph's alone."""
    sharded = assert_sound(HeadsOutside(), (torch.randn(2, 5, 24),), ranks=ranks)
    assert placements(sharded.plan)["qkv.weight"] == "S(0)"


@RANKS
@BOTH
@pytest.mark.parametrize("what", ["buffer", "parameter", "scale", "relative"])
def test_a_buffer_parameter_scale_or_bias_of_each_head(
    what: str, ranks: int, options: dict[str, str]
) -> None:
    sharded = assert_sound(PerHead(what), (torch.randn(2, 5, 24),), ranks=ranks, **options)
    if options["search"] == "tensor":
        assert placements(sharded.plan)["qkv.weight"] == "S(0,3)"


@pytest.mark.parametrize("ranks", [2, 3])
@BOTH
def test_a_layer_norm_of_each_head_before_a_row_parallel_product(
    ranks: int, options: dict[str, str]
) -> None:
    sharded = assert_sound(NormOfEachHead(), (torch.randn(2, 5, 24),), ranks=ranks, **options)
    if options["search"] == "tensor":
        assert placements(sharded.plan)["qkv.weight"] == "S(0,3)"


class ExpandedKeys(Heads):
    """Key/value heads repeated by expand and reshape, as transformers does."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.size).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        k, v = (
            t[:, :, None].expand(batch, self.kv, self.heads // self.kv, length, self.size).reshape(batch, self.heads, length, self.size)
            for t in (k, v)
        )  # fmt: skip
        scores = torch.matmul(q, k.transpose(2, 3)) / 2
        y = scores.softmax(-1, dtype=torch.float64) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


@RANKS
@BOTH
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (7, 7), (4, 2), (4, 1), (6, 3), (12, 4)])
@pytest.mark.parametrize("kind", [Heads, GroupedQueries, ExpandedKeys])
def test_heads_that_ranks_do_not_divide(
    kind: type[Heads], heads: int, kv_heads: int, ranks: int, options: dict[str, str]
) -> None:
    x = torch.randn(2, 5, 4 * heads)
    assert_sound(kind(heads, kv_heads), (x,), ranks=ranks, steps=1, **options)


class Block(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention, width = Heads(heads, kv_heads), 4 * heads
        self.mlp = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


@BOTH
@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(3, 3, 2), (28, 28, 8), (28, 4, 8)])
def test_3_heads_on_2_ranks_and_28_on_8(
    heads: int, kv_heads: int, ranks: int, options: dict[str, str]
) -> None:
    """Whatever becomes of the attention, the MLP beside it is split."""
    model, x = Block(heads, kv_heads), torch.randn(2, 5, 4 * heads)
    sharded = assert_sound(model, (x,), ranks=ranks, steps=1, **options)
    where = splits(sharded.plan)
    assert "replicated" not in (where["mlp.0.weight"], where["mlp.2.weight"])


@pytest.mark.parametrize(("kv_heads", "ranks"), [(2, 4), (1, 2), (1, 4)])
@pytest.mark.parametrize("kind", [Heads, GroupedQueries, ExpandedKeys])
def test_fewer_key_value_heads_than_ranks(kind: type[Heads], kv_heads: int, ranks: int) -> None:
    """Query heads are split, so that each rank needs a key/value head that others need too."""
    given, asked = (torch.randn(2, 5, 16),), {"q.weight": "column", "out.weight": "row"}
    sharded = assert_sound(kind(4, kv_heads), given, ranks=ranks, constraints=asked)
    assert placements(sharded.plan)["q.weight"] == "S(0)"
    # Keys and values made by every rank: each has a share of their gradients.
    asked |= {"[kv].weight": "replicated", "[kv].bias": "replicated"}
    for hardware in (IDEAL_TENSOR, H100):
        assert_sound(kind(4, kv_heads), given, ranks=ranks, constraints=asked, **hardware)


@RANKS
@BOTH
def test_views_with_sizes_written_as_constants(ranks: int, options: dict[str, str]) -> None:
    model = Heads(12, 12, constants=True)
    sharded = assert_sound(model, (torch.randn(2, 5, 48),), ranks=ranks, **options)
    if options["search"] == "tensor":
        assert split_share(sharded.plan) == 1.0


@pytest.mark.parametrize("kind", [ChunkedThenHeads, TwoBranches])
def test_a_sequence_of_five_under_sequence_sharding(kind: type[nn.Module]) -> None:
    assert_sound(kind(), (torch.randn(3, 5, 24),), **IDEAL_ALL)


@pytest.mark.parametrize(("length", "ranks"), [(5, 2), (5, 3), (7, 4)])
def test_a_sequence_of_odd_length_between_products(length: int, ranks: int) -> None:
    """What lies between products is split along the sequence, as sequence parallelism has it."""
    given, split = (torch.randn(1, length, 24),), {"layer_norm": "S(1) R R -> S(1)"}
    split |= {"gelu": "S(1) -> S(1)", "/aten.add.Tensor#1": "S(1) S(1) -> S(1)"}
    plan = pinned_plan(TwoBranches(), given, ranks, split)
    assert_sound(TwoBranches(), given, ranks=ranks, plan=plan)


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 6, batch_first=True, **options)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        y, weights = self.attention(x, x, x, attn_mask=mask)
        return y, weights


@RANKS
@BOTH
@pytest.mark.parametrize("given", [{}, {"add_bias_kv": True}, {"kdim": 24, "vdim": 24}], ids=str)
def test_multihead_attention(ranks: int, given: dict[str, Any], options: dict[str, str]) -> None:
    x, mask = torch.randn(2, 5, 24), torch.ones(5, 5).triu(1).bool()
    assert_sound(SelfAttention(**given), (x, mask), ranks=ranks, **options)


@RANKS
@BOTH
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_layer(
    ranks: int, norm_first: bool, training: bool, options: dict[str, str]
) -> None:
    model = nn.TransformerEncoderLayer(24, 6, 48, 0.0, batch_first=True, norm_first=norm_first)
    assert_sound(model.train(training), (torch.randn(2, 5, 24),), ranks=ranks, **options)


@RANKS
@BOTH
def test_transformer(ranks: int, options: dict[str, str]) -> None:
    model = nn.Transformer(24, 6, 1, 1, 24, 0.0, batch_first=True)
    given = torch.randn(2, 5, 24), torch.randn(2, 4, 24)
    assert_sound(model, given, ranks=ranks, steps=1, **options)


@RANKS
@BOTH
def test_rotary_tables_and_masks_beside_split_activations(
    ranks: int, options: dict[str, str]
) -> None:
    sharded = assert_sound(Rotary(), (torch.randn(2, 5, 48),), ranks=ranks, **options)
    if options["search"] == "tensor":
        assert split_share(sharded.plan) == 1.0


class ComplexRotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (6, 2, 2))
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] / torch.tensor(
            [1.0, 10.0], dtype=x.dtype
        )
        turned = torch.view_as_complex(q) * torch.polar(torch.ones_like(angles), angles)
        return self.out(torch.view_as_real(turned).flatten(2))


@RANKS
@BOTH
def test_complex_rotary(ranks: int, options: dict[str, str]) -> None:
    assert_sound(ComplexRotary(), (torch.randn(2, 5, 24),), ranks=ranks, **options)
