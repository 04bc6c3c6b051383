"""Weights on which tensor-parallel tools go wrong: tied, looked up in, used as plain tensors, frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import H100, assert_sound, placements, ties
from pitfall_models import BOTH, RANKS, Language, TiedHead, parameter
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@RANKS
@BOTH
@pytest.mark.parametrize("vocabulary", [24, 97])
def test_a_head_tied_to_the_embedding(ranks: int, vocabulary: int, options: dict[str, str]) -> None:
    model = TiedHead(vocabulary)
    ids = torch.randint(0, vocabulary, (2, 6))
    sharded = assert_sound(model, (ids,), ranks=ranks, **options)
    assert ["emb.weight", "head.weight"] in ties(sharded)
    record = next(w for w in sharded.plan.weights if w.fqn == "emb.weight")
    assert record.fqns == ("emb.weight", "head.weight")
    assert record.split != "replicated"


@pytest.mark.parametrize("ranks", [2, 4, 8])
@BOTH
@pytest.mark.parametrize("vocabulary", [97, 11, 257, 50257])
def test_vocabularies_of_97_11_and_50257(
    ranks: int, vocabulary: int, options: dict[str, str]
) -> None:
    width = 16 if vocabulary < 1000 else 8
    ids = torch.randint(0, vocabulary, (2, 5))
    assert_sound(Language(vocabulary, width), (ids,), ranks=ranks, **options)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_vocabulary_of_50257_is_split_where_it_pays(ranks: int) -> None:
    """Rows of the table and classes of the head, uneven, never gathered."""
    ids = torch.zeros(8, 1024, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = OnlyLoss(50257, 768)
    asked = {"emb.weight": "vocab"}
    plan = autoshard.plan(model, ranks, (ids,), constraints=asked, **H100)
    where = {weight.fqn: weight for weight in plan.weights}
    assert where["head.weight"].split == "column"
    assert (
        where["emb.weight"].local_shape
        == where["head.weight"].local_shape
        == (-(-50257 // ranks), 768)
    )
    assert not [c for c in plan.collectives if c.kind == "all_gather"]


class OnlyLoss(Language):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)[1]


class Embedded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(24, 12, **options), nn.Linear(12, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.emb(ids))


@RANKS
@BOTH
@pytest.mark.parametrize(
    "given",
    [{"padding_idx": 0}, {"padding_idx": 13}, {"padding_idx": -1}, {"scale_grad_by_freq": True}],
    ids=str,
)
def test_embedding_options(ranks: int, given: dict[str, Any], options: dict[str, str]) -> None:
    ids = torch.randint(0, 24, (2, 12))
    ids[0, :4] = torch.tensor([0, 13, 23, 13])
    assert_sound(Embedded(**given), (ids,), ranks=ranks, **options)


@RANKS
@BOTH
def test_embedding_max_norm_is_whole_and_named(ranks: int, options: dict[str, str]) -> None:
    """The table is written to in forward: it is whole, and written to once."""
    sharded = assert_sound(
        Embedded(max_norm=1.0), (torch.randint(0, 24, (2, 12)),), ranks=ranks, **options
    )
    assert placements(sharded.plan)["emb.weight"] == "I"
    assert [(f.op, f.modules) for f in sharded.plan.fallbacks] == [
        ("aten.embedding_renorm_.default", ("emb",))
    ]
    reasons = {weight.fqn: weight.reason for weight in sharded.plan.weights}
    assert reasons["emb.weight"].startswith("forward writes to it")


class Bag(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(24, 12, mode=mode)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids)


@BOTH
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str, options: dict[str, str]) -> None:
    assert_sound(Bag(mode), (torch.randint(0, 24, (4, 6)),), **options)


class Weights(nn.Module):
    """Weights used as plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v, self.scale = parameter(12, 24), parameter(24, 12), parameter(24)
        self.table, self.cls = parameter(1, 9, 12), parameter(1, 1, 12)
        self.unused = parameter(3, 3)
        self.frozen = nn.Parameter(torch.randn(12, 12), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), 1) + self.table[:, : x.shape[1] + 1]
        y = (x @ self.w) * self.scale.softmax(0)
        y = torch.einsum("bsf,fd->bsd", y, self.v + self.w.t())
        return y @ self.frozen + (self.w**2).sum()


@RANKS
@BOTH
def test_weights_as_plain_tensors(ranks: int, options: dict[str, str]) -> None:
    assert_sound(Weights(), (torch.randn(2, 5, 12),), ranks=ranks, **options)


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.b.weight = nn.Parameter(self.a.weight.detach().clone())
        self.c = self.a

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.a(x).tanh()
        return self.c(self.b(x)) + F.linear(x, self.a.weight.t())


@RANKS
@BOTH
def test_a_layer_used_again(ranks: int, options: dict[str, str]) -> None:
    assert_sound(UsedTwice(), (torch.randn(4, 12),), ranks=ranks, **options)


@BOTH
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(kind: str, options: dict[str, str]) -> None:
    layer = nn.Linear(12, 12)
    getattr(nn.utils.parametrizations, kind)(layer)
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(12, 12))
    if kind == "spectral_norm":
        model.eval()
    assert_sound(model, (torch.randn(4, 12),), **options)


@RANKS
@BOTH
def test_frozen_weights(ranks: int, options: dict[str, str]) -> None:
    model = nn.Sequential(
        nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 12)
    )
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    assert_sound(model, (torch.randn(4, 12),), ranks=ranks, **options)
