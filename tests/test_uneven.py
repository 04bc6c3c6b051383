"""Dimensions that the ranks do not divide: cut as `torch.chunk` cuts them, the last slices smaller."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import gpt2
from oracle import IDEAL_ALL, IDEAL_TENSOR, assert_sound, placements, splits
from processes import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard

SLOW = pytest.mark.slow
RANKS = pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW)]
)
BOTH = pytest.mark.parametrize("options", [IDEAL_TENSOR, IDEAL_ALL], ids=["tensor", "all"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def mlp(inside: int, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inside), nn.GELU(), nn.Linear(inside, width))


@RANKS
@BOTH
@pytest.mark.parametrize("inside", [5, 7, 11, 13])
def test_an_odd_inner_dimension(inside: int, ranks: int, options: dict[str, str]) -> None:
    sharded = assert_sound(mlp(inside), (torch.randn(6, 8),), ranks=ranks, **options)
    reaches = len(torch.arange(inside).chunk(ranks)) == ranks
    if options == IDEAL_TENSOR and reaches:
        found = splits(sharded.plan)
        assert "replicated" not in (found["0.weight"], found["2.weight"])


def test_shapes_of_a_rank() -> None:
    """Records give the largest slice, as every rank's memory must hold it."""
    plan = autoshard.plan(mlp(11), 4, (torch.randn(6, 8),), **IDEAL_TENSOR)
    shapes = {weight.fqn: weight.local_shape for weight in plan.weights}
    assert shapes["0.weight"] == (3, 8)
    assert shapes["0.bias"] == (3,)
    assert shapes["2.weight"] == (8, 3)


class Words(nn.Module):
    """A vocabulary that is looked up in, and a head with a loss; tied or not."""

    def __init__(self, vocabulary: int, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 12, padding_idx=3)
        self.inner = mlp(24, 12)
        self.head = nn.Linear(12, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.inner(self.embed(ids)))
        smoothed = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), label_smoothing=0.1)
        return smoothed + F.cross_entropy(logits.transpose(1, 2), ids, ignore_index=1)


@RANKS
@BOTH
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [97, 11])
def test_vocabularies(vocabulary: int, tied: bool, ranks: int, options: dict[str, str]) -> None:
    ids = torch.randint(vocabulary, (4, 6))
    assert_sound(Words(vocabulary, tied), (ids,), ranks=ranks, **options)


@RANKS
@pytest.mark.parametrize("vocabulary", [97, 11])
def test_a_vocabulary_is_split_where_asked(vocabulary: int, ranks: int) -> None:
    asked = {"embed.weight": "vocab", "head.weight": "column"}
    ids = torch.randint(vocabulary, (4, 6))
    sharded = assert_sound(Words(vocabulary, False), (ids,), ranks=ranks, constraints=asked)
    assert placements(sharded.plan)["embed.weight"] == "S(0)"
    kinds = {c.kind for c in sharded.plan.collectives if "loss" in c.op}
    assert "all_gather" not in kinds, "statistics are reduced, logits never gathered"


class Means(nn.Module):
    """Reductions over batch and sequence, of which a slice's mean is no equal share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.b(self.norm(self.a(x)).relu())
        wanted = torch.ones_like(y)
        return (
            y.mean(1),
            y.mean((0, 1)),
            F.mse_loss(y, wanted),
            F.smooth_l1_loss(y, wanted),
            y.sum(0),
        )


@RANKS
@pytest.mark.parametrize("shape", [(5, 4), (4, 5), (7, 5)])
def test_odd_batches_and_sequences(shape: tuple[int, int], ranks: int) -> None:
    assert_sound(Means(), (torch.randn(*shape, 6),), ranks=ranks, **IDEAL_ALL)


class Attention(nn.Module):
    """Heads that the ranks divide, over an odd sequence and in an odd batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, 12, 2).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, 24))


@RANKS
@BOTH
@pytest.mark.parametrize("shape", [(5, 7), (3, 5)])
def test_attention(shape: tuple[int, int], ranks: int, options: dict[str, str]) -> None:
    assert_sound(Attention(), (torch.randn(*shape, 24),), ranks=ranks, **options)


# --- on real processes --------------------------------------------------------------------------


def trains() -> list[str]:
    """Three steps of AdamW with clipping, state dicts in and out, and torch's own slices."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    size, said = dist.get_world_size(), []
    model, kwargs = gpt2(vocabulary=97)
    asked: dict[str, Any] = {"transformer.wte.weight": "vocab"}
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        torch.manual_seed(0)
        reference = copy.deepcopy(model)
        sharded = autoshard.autoshard(
            copy.deepcopy(model), size, kwargs=kwargs, constraints=asked, **IDEAL_TENSOR
        )
        for name, held in sharded.named_parameters():
            assert isinstance(held, DTensor)
            whole = dict(reference.named_parameters())[name].detach()
            torch.testing.assert_close(held.full_tensor(), whole)
            if "_Strided" not in str(held.placements):
                own = distribute_tensor(whole, held.device_mesh, held.placements)
                torch.testing.assert_close(held.to_local(), own.to_local())
            if held.placements != (Replicate(),) and whole.shape[held.placements[0].dim] % size:
                said.append(name)
        optimizers = [
            torch.optim.AdamW(m.parameters(), 1e-3, **options) for m in (reference, sharded)
        ]
        for _ in range(3):
            norms = []
            for module, optimizer in zip((reference, sharded), optimizers, strict=True):
                optimizer.zero_grad()
                module(**kwargs).loss.backward()
                norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
                optimizer.step()
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-6)
        state = sharded.full_state_dict()
        for name, whole in reference.state_dict().items():
            torch.testing.assert_close(state[name], whole, rtol=1e-3, atol=2e-5)
        sharded.load_state_dict(model.state_dict())
        for name, whole in sharded.full_state_dict().items():
            assert torch.equal(whole, model.state_dict()[name])
    return said


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=SLOW)])
def test_training_on_gloo(size: int) -> None:
    for said in run_ranks(trains, size):
        assert "transformer.wte.weight" in said
