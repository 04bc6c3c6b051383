"""Patterns on which tensor-parallel tools go wrong, each the smallest model that shows it.

Sound means: outputs, every gradient, parameters after two steps and buffers equal the unsharded model's
(`oracle.assert_sound`), by sharding well or by leaving whole what cannot be split, and naming it.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from oracle import IDEAL_ALL, IDEAL_TENSOR, assert_sound, placements, split_share, ties
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard
from autoshard import CaptureError, ConstraintError, OptionsError, ShardedModule

SLOW = pytest.mark.slow
RANKS = pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW)]
)
BOTH = pytest.mark.parametrize("options", [IDEAL_TENSOR, IDEAL_ALL], ids=["tensor", "all"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def kinds(sharded: ShardedModule, module: str = "") -> list[str]:
    """The kinds of the plan's collectives in modules that start with `module`."""
    found = sharded.plan.collectives
    return [c.kind for c in found if c.kind and c.module.startswith(module)]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


# --- silent: no error, wrong numbers --------------------------------------------------------------


class FusedQkv(nn.Module):
    """One product for q, k and v, cut as the subclass says."""

    def __init__(self, width: int = 24, heads: int = 12) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.per_head(part) for part in x.chunk(3, -1))

    def per_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*self.cut(self.qkv(x)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class ChunkedThenHeads(FusedQkv):
    pass


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


class HeadsOutside(FusedQkv):
    """The same weight shape, but three per head: a plain cut of the heads."""

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        cut = x.unflatten(-1, (self.heads, 3, self.size))
        return tuple(part.transpose(1, 2) for part in cut.unbind(3))


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


@RANKS
def test_fused_qkv_by_heads_is_cut_plainly(ranks: int) -> None:
    sharded = assert_sound(HeadsOutside(), (torch.randn(2, 5, 24),), ranks=ranks)
    assert placements(sharded.plan)["qkv.weight"] == "S(0)"


class GateUp(nn.Module):
    def __init__(self, width: int = 12, hidden: int = 24) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


@RANKS
@BOTH
def test_gate_and_up_in_one_product(ranks: int, options: dict[str, str]) -> None:
    sharded = assert_sound(GateUp(), (torch.randn(2, 5, 12),), ranks=ranks, **options)
    if options["search"] == "tensor":
        where = placements(sharded.plan)
        assert where["gate_up.weight"] == "S(0,2)"
        assert where["down.weight"] == "S(1)"


class Glu(GateUp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.glu(self.gate_up(x), -1))


@RANKS
@BOTH
def test_glu_looks_across_the_split(ranks: int, options: dict[str, str]) -> None:
    assert_sound(Glu(), (torch.randn(2, 5, 12),), ranks=ranks, **options)


@RANKS
@BOTH
def test_row_parallel_bias_is_added_once(ranks: int, options: dict[str, str]) -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
    constraints = {"0.weight": "column", "2.weight": "row", "2.bias": "replicated"}
    sharded = assert_sound(
        model, (torch.randn(4, 12),), ranks=ranks, constraints=constraints, **options
    )
    assert placements(sharded.plan)["2.weight"] == "S(1)"


class TwoBranches(nn.Module):
    """Attention and MLP beside each other: two row-parallel products whose sums meet."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.attention = ChunkedThenHeads()
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.mlp(y)


@RANKS
@BOTH
def test_two_row_parallel_branches_meet(ranks: int, options: dict[str, str]) -> None:
    assert_sound(TwoBranches(), (torch.randn(2, 5, 24),), ranks=ranks, **options)


class TiedHead(nn.Module):
    def __init__(self, vocabulary: int = 24, width: int = 12) -> None:
        super().__init__()
        self.emb, self.mid = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.mid(self.emb(ids)).tanh())
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@RANKS
@BOTH
@pytest.mark.parametrize("vocabulary", [24, 97])
def test_tied_head(ranks: int, vocabulary: int, options: dict[str, str]) -> None:
    model = TiedHead(vocabulary)
    ids = torch.randint(0, vocabulary, (2, 6))
    sharded = assert_sound(model, (ids,), ranks=ranks, **options)
    assert ["emb.weight", "head.weight"] in ties(sharded)
    record = next(w for w in sharded.plan.weights if w.fqn == "emb.weight")
    assert record.fqns == ("emb.weight", "head.weight")


class Between(nn.Module):
    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.a, self.between, self.b = nn.Linear(12, 24), between, nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


class DividedByNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True) + F.normalize(x, dim=-1)


class Rms(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + x.amax(-1, keepdim=True)


@RANKS
@BOTH
@pytest.mark.parametrize(
    "between",
    [nn.Softmax(-1), nn.LogSoftmax(-1), nn.LayerNorm(24), nn.RMSNorm(24), DividedByNorm(), Rms(), Centred(),
     nn.Softmin(-1), nn.LocalResponseNorm(3)],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_a_reduction_between_column_and_row(
    between: nn.Module, ranks: int, options: dict[str, str]
) -> None:
    x = (
        torch.randn(2, 5, 12)
        if not isinstance(between, nn.LocalResponseNorm)
        else torch.randn(2, 12)
    )
    if isinstance(between, nn.LocalResponseNorm):
        between = nn.Sequential(nn.Unflatten(-1, (24, 1)), between, nn.Flatten())
    assert_sound(Between(between), (x,), ranks=ranks, **options)


class PerHead(FusedQkv):
    """Attention with something of its own for each head."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        slopes = torch.arange(1.0, self.heads + 1).neg().exp2().view(self.heads, 1, 1)
        if what == "buffer":
            self.register_buffer("slopes", slopes)
        elif what == "parameter":
            self.slopes = nn.Parameter(slopes)
        elif what == "scale":
            self.slopes = parameter(self.heads, 1, 1)
        elif what == "relative":
            self.table = nn.Embedding(9, self.heads)

    def bias(self, n: int) -> Tensor:
        distance = torch.arange(n)[:, None] - torch.arange(n)[None]
        if self.what == "relative":
            return self.table(distance + 4).permute(2, 0, 1)
        return self.slopes * distance

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.cut(self.qkv(x))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size)
        if self.what == "scale":
            scores = scores * self.slopes
        else:
            scores = scores + self.bias(x.shape[1])
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@RANKS
@BOTH
@pytest.mark.parametrize("what", ["buffer", "parameter", "scale", "relative"])
def test_a_value_of_its_own_for_each_head(what: str, ranks: int, options: dict[str, str]) -> None:
    sharded = assert_sound(PerHead(what), (torch.randn(2, 5, 24),), ranks=ranks, **options)
    if options["search"] == "tensor":
        assert placements(sharded.plan)["qkv.weight"] == "S(0,3)"


class NormOfEachHead(FusedQkv):
    def __init__(self) -> None:
        super().__init__(24, 6)
        self.q_norm, self.k_norm = nn.LayerNorm(self.size), nn.RMSNorm(self.size)

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().cut(x)
        return self.q_norm(q), self.k_norm(k), v


@pytest.mark.parametrize("ranks", [2, 3])
@BOTH
def test_norm_of_each_head(ranks: int, options: dict[str, str]) -> None:
    sharded = assert_sound(NormOfEachHead(), (torch.randn(2, 5, 24),), ranks=ranks, **options)
    if options["search"] == "tensor":
        assert placements(sharded.plan)["qkv.weight"] == "S(0,3)"


class Shares(nn.Module):
    """What is done to shares before they are summed must be linear in them."""

    def __init__(self, after: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 24, bias=False), nn.Linear(24, 12, bias=False)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        match self.after:
            case "add":
                return y + 10
            case "add tensor":
                return y + x.new_full((12,), 10.0)
            case "rsub":
                return 1 - y
            case "scale and add":
                return torch.add(y, x, alpha=3) * 2 + 10
            case "divide":
                return 10 / (y.abs() + 1) + y / 4
            case "where":
                return torch.where(x > 0, y, 1.0)
            case "masked":
                return y.masked_fill(x > 0, 3.0) + y.masked_fill(x > 0, 0.0)
            case "clamp":
                return y.clamp(-0.1, 0.1)
            case "pad":
                return F.pad(y, (1, 1), value=2.0) + F.pad(y, (1, 1))
            case "square":
                return y * y + y**2
            case "cat":
                return torch.cat([y, x], -1)
            case "addcmul":
                return torch.addcmul(y, x, x, value=0.5)
            case "lerp":
                return torch.lerp(y, x, 0.3)
            case "cumsum":
                return y.cumsum(-1)
            case "mean":
                return (y.mean(0) + 1) * y.sum()
            case "cast":
                return y.float().double() + y
        raise AssertionError(self.after)


@RANKS
@BOTH
@pytest.mark.parametrize(
    "after",
    ["add", "add tensor", "rsub", "scale and add", "divide", "where", "masked", "clamp", "pad", "square",
     "cat", "addcmul", "lerp", "cumsum", "mean", "cast"],
)  # fmt: skip
def test_shares_and_a_constant(after: str, ranks: int, options: dict[str, str]) -> None:
    bound = 1e-6 if after == "cast" else 1e-9
    assert_sound(Shares(after), (torch.randn(4, 12),), ranks=ranks, bound=bound, **options)


CONVOLUTIONS = {
    "conv2d": lambda: nn.Sequential(nn.Conv2d(6, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 6, 1)),
    "conv1d": lambda: nn.Sequential(nn.Conv1d(6, 12, 3), nn.GELU(), nn.Conv1d(12, 6, 3, padding="same")),
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(6, 12, 1), nn.Conv2d(12, 12, 3, groups=12, padding=1), nn.Conv2d(12, 6, 1)
    ),
    "grouped": lambda: nn.Sequential(nn.Conv2d(12, 24, 3, groups=6), nn.ReLU(), nn.Conv2d(24, 12, 1, groups=2)),
    "depthwise multiplier": lambda: nn.Sequential(nn.Conv2d(6, 12, 3, groups=6), nn.Conv2d(12, 6, 1)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(6, 12, 2, stride=2), nn.ReLU(), nn.Conv2d(12, 6, 2, 2)),
    "transposed grouped": lambda: nn.ConvTranspose2d(6, 12, 2, groups=3),
    "dilated": lambda: nn.Conv2d(6, 12, 3, dilation=2, padding=2, padding_mode="reflect"),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(6, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 6, 1)),
    "group norm": lambda: nn.Sequential(nn.Conv2d(6, 12, 3), nn.GroupNorm(6, 12), nn.SiLU(), nn.Conv2d(12, 6, 1)),
    "instance norm": lambda: nn.Sequential(nn.Conv2d(6, 12, 3), nn.InstanceNorm2d(12, affine=True), nn.Conv2d(12, 6, 1)),
    "pooled": lambda: nn.Sequential(nn.Conv2d(6, 12, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 6)),
    "pixel shuffle": lambda: nn.Sequential(nn.Conv2d(6, 24, 3), nn.PixelShuffle(2), nn.Conv2d(6, 6, 1)),
    "upsampled": lambda: nn.Sequential(nn.Conv2d(6, 12, 3), nn.Upsample(scale_factor=2), nn.Conv2d(12, 6, 1)),
}  # fmt: skip


@RANKS
@BOTH
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, ranks: int, options: dict[str, str]) -> None:
    model = CONVOLUTIONS[name]()
    channels = next(p for p in model.modules() if hasattr(p, "in_channels")).in_channels
    x = torch.randn(4, channels, 8) if name == "conv1d" else torch.randn(4, channels, 8, 8)
    assert_sound(model, (x,), ranks=ranks, **options)


@pytest.mark.parametrize("name", ["conv2d", "depthwise", "batch norm", "pooled"])
def test_channels_are_split(name: str) -> None:
    sharded = assert_sound(CONVOLUTIONS[name](), (torch.randn(4, 6, 8, 8),))
    assert split_share(sharded.plan) >= 0.9


class Loss(nn.Module):
    def __init__(self, classes: int, **options: Any) -> None:
        super().__init__()
        self.head, self.options = nn.Linear(12, classes), options

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target, **self.options)


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


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.out = norm, nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


@RANKS
@BOTH
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_with_the_batch_split(
    ranks: int, training: bool, options: dict[str, str]
) -> None:
    model = Normed(nn.BatchNorm1d(12, momentum=0.3)).train(training)
    assert_sound(model, (torch.randn(12, 12) * 3 + 1,), ranks=ranks, **options)


@RANKS
def test_gradient_norm_over_split_and_whole_parameters(ranks: int) -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 12)).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    sharded = autoshard.autoshard(copy.deepcopy(model), ranks, (x,), **IDEAL_TENSOR)
    norms = []
    for module in (model, sharded):
        module(x).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.1))
    torch.testing.assert_close(norms[1], norms[0])
    for (name, a), b in zip(model.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)


# --- loud: an error, often far from its cause -----------------------------------------------------


class Heads(nn.Module):
    """Attention with fewer key/value heads, as Llama has it."""

    def __init__(
        self, heads: int, kv_heads: int, size: int = 4, *, constants: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.kv, self.size, self.constants = heads, kv_heads, size, constants
        width = heads * size
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, kv_heads * size) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = (2, 5, self.heads * self.size) if self.constants else x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv, self.size).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class GroupedQueries(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (n, self.size)).transpose(1, 2)
            for layer, n in ((self.q, self.heads), (self.k, self.kv), (self.v, self.kv))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


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
def test_head_counts_and_ranks(
    kind: type[Heads], heads: int, kv_heads: int, ranks: int, options: dict[str, str]
) -> None:
    x = torch.randn(2, 5, 4 * heads)
    assert_sound(kind(heads, kv_heads), (x,), ranks=ranks, steps=1, **options)


@RANKS
@BOTH
def test_sizes_in_views_written_as_constants(ranks: int, options: dict[str, str]) -> None:
    model = Heads(12, 12, constants=True)
    sharded = assert_sound(model, (torch.randn(2, 5, 48),), ranks=ranks, **options)
    if options["search"] == "tensor":
        assert split_share(sharded.plan) == 1.0


@RANKS
@BOTH
def test_sizes_that_ranks_do_not_divide(ranks: int, options: dict[str, str]) -> None:
    model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 8))
    assert_sound(model, (torch.randn(4, 8),), ranks=ranks, **options)


class Language(nn.Module):
    def __init__(self, vocabulary: int, width: int = 12) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.emb(ids))
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("ranks", [2, 4, 8])
@BOTH
@pytest.mark.parametrize("vocabulary", [97, 11, 257])
def test_odd_vocabularies(ranks: int, vocabulary: int, options: dict[str, str]) -> None:
    assert_sound(
        Language(vocabulary, 16), (torch.randint(0, vocabulary, (2, 5)),), ranks=ranks, **options
    )


@pytest.mark.parametrize("kind", [ChunkedThenHeads, TwoBranches])
def test_a_sequence_of_five_under_sequence_sharding(kind: type[nn.Module]) -> None:
    assert_sound(kind(), (torch.randn(3, 5, 24),), **IDEAL_ALL)


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


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.emb, self.rnn = nn.Linear(6, 12), kind(12, 12, batch_first=True, **options)
        self.head = nn.Linear(12 * (2 if options.get("bidirectional") else 1), 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.emb(x))[0])


@RANKS
@BOTH
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.RNNBase], ranks: int, options: dict[str, str]) -> None:
    sharded = assert_sound(Recurrent(kind), (torch.randn(2, 5, 6),), ranks=ranks, **options)
    weight = next(w for w in sharded.plan.weights if w.fqn == "rnn.weight_ih_l0")
    assert weight.split != "replicated" or weight.reason == "rnn needs it whole"


def test_a_bidirectional_lstm_of_two_layers() -> None:
    model = Recurrent(nn.LSTM, num_layers=2, bidirectional=True)
    assert_sound(model, (torch.randn(2, 5, 6),))


class Rotary(Heads):
    """Rotary tables as plain buffers, beside activations that are split."""

    def __init__(self) -> None:
        super().__init__(12, 12)
        angles = torch.arange(5.0)[:, None] / 10 ** torch.arange(2.0)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        self.mask = torch.ones(5, 5).tril().log()

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = self.turned(q), self.turned(k)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask.to(x.dtype))
        return self.out(y.transpose(1, 2).flatten(2))


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


OPTIMIZERS = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 12)).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    sharded = autoshard.autoshard(copy.deepcopy(model), 2, (x,), **IDEAL_TENSOR)
    for module in (model, sharded):
        optimizer = OPTIMIZERS[name](module.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    for (label, a), b in zip(model.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(b, a, msg=label)


def test_a_state_dict_goes_in_and_out() -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 12))
    x = torch.randn(4, 12)
    sharded = autoshard.autoshard(model, 2, (x,), **IDEAL_TENSOR)
    other = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 12))
    assert list(sharded.state_dict()) == list(other.state_dict())
    sharded.load_state_dict(other.state_dict())
    torch.testing.assert_close(sharded(x), other(x))
    fresh = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 12))
    fresh.load_state_dict(sharded.full_state_dict())
    torch.testing.assert_close(fresh.eval()(x), other.eval()(x))


# --- in place -----------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.a, self.b = nn.Linear(12, 24), nn.Linear(24, 12)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(getattr(self, self.what)(self.a(x)))

    def slice_is_set(self, y: Tensor) -> Tensor:
        y[:, 3:6] = 1
        return y * 2

    def slice_is_set_of_a_relu(self, y: Tensor) -> Tensor:
        z = y.relu() * 1
        z[1:, 3:6] = y[1:, :3]
        return z + y

    def added_to(self, y: Tensor) -> Tensor:
        return y.add_(1).mul_(2) + y

    def row_is_added(self, y: Tensor) -> Tensor:
        z = y.clone()
        z[0].add_(1)
        z[:, ::2].mul_(3)
        return z

    def masked(self, y: Tensor) -> Tensor:
        return y.masked_fill_(y.detach() > 0.5, 0.25)

    def index_copied(self, y: Tensor) -> Tensor:
        return y.clone().index_copy_(1, torch.tensor([0, 5]), y[:, 1:3] * 2)

    def index_added(self, y: Tensor) -> Tensor:
        return y.clone().index_add_(1, torch.tensor([0, 5, 5]), y[:, 1:4])

    def index_put(self, y: Tensor) -> Tensor:
        z = y.clone()
        z[torch.tensor([0, 2]), torch.tensor([1, 7])] = 5.0
        z[y.detach() > 0] = 0.5
        return z

    def scattered(self, y: Tensor) -> Tensor:
        index = torch.tensor([[0, 3], [1, 2], [4, 5], [6, 7]])
        return y.clone().scatter_(1, index, 0.0).scatter_add_(1, index, y[:, :2])

    def copied(self, y: Tensor) -> Tensor:
        z = torch.zeros_like(y)
        z.copy_(y)
        z[:, :12].copy_(y[:, 12:])
        return z

    def filled_by_parts(self, y: Tensor) -> Tensor:
        z = y.new_empty(y.shape)
        z[:, :12] = y[:, 12:]
        z[:, 12:] = y[:, :12].relu()
        return z

    def base_through_view(self, y: Tensor) -> Tensor:
        z = y * 1
        view = z.view(4, 4, 6)
        view[:, 1] += 1
        return z + view.flatten(1)

    def view_through_base(self, y: Tensor) -> Tensor:
        z = y * 1
        view = z.unflatten(1, (4, 6)).transpose(1, 2)
        z.mul_(2)
        return view.transpose(1, 2).flatten(1)

    def view_of_view(self, y: Tensor) -> Tensor:
        z = y * 1
        a, b = z[:, :12], z[:, 12:]
        a += b
        c = z[:, 6:18].unsqueeze(0)
        c.sub_(1)
        return torch.cat((b, a), 1) + z

    def several_views(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = y * 1
            a, b, c = z.chunk(3, 1)
            a.add_(b)
            z.mul_(2)
            c.copy_(a)
        return y * z + torch.cat((a, b, c), 1)

    def views_of_one_row_and_column(self, y: Tensor) -> Tensor:
        z = y * 1
        row, column = z[1], z.t()[2]
        row += 1
        column *= 2
        return z + row + column[:, None]

    def one_of_several_results(self, y: Tensor) -> Tensor:
        values, indices = y.topk(3, -1)
        values /= values.sum(-1, keepdim=True)
        return torch.zeros_like(y).scatter(-1, indices, values) + y

    def zeroed_and_filled(self, y: Tensor) -> Tensor:
        z, w = y * 1, y * 2
        z.zero_()
        w.fill_(3.0)
        return z + w + y

    def expanded(self, y: Tensor) -> Tensor:
        z = y.sum(0, keepdim=True)
        wide = z.expand(4, -1)
        z.mul_(2)
        return wide + y

    def reshaped(self, y: Tensor) -> Tensor:
        z = y * 1
        same, other = z.reshape(2, 2, 24), z.t().reshape(24, 4)
        z.add_(1)
        return same.flatten(0, 1) + other.t().contiguous() + z

    def read_before_and_after(self, y: Tensor) -> Tensor:
        z = y * 1
        before = z.sum(1, keepdim=True)
        z.add_(before)
        after = z.relu()
        return z.add_(1) + before + after

    def buffers_counted(self, y: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y - self.mean.clone()

    def buffer_replaced(self, y: Tensor) -> Tensor:
        self.mean.copy_(y.detach().sum(0))
        return y + self.mean.mean()

    def buffer_by_view(self, y: Tensor) -> Tensor:
        self.mean[3:6].add_(1)
        self.mean.view(4, 6)[0] *= 2
        return y * self.mean.exp()

    def relu_in_place(self, y: Tensor) -> Tensor:
        return F.relu_(y) + F.silu(y, inplace=False)

    def squeezed(self, y: Tensor) -> Tensor:
        z = (y * 1).unsqueeze_(1).squeeze_(1).transpose_(0, 1)
        return z.t()

    def out_argument(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.empty_like(y)
            torch.add(y, 1, out=z)
        return y * z


IN_PLACE = [name for name in vars(InPlace) if not name.startswith("_") and name != "forward"]


@RANKS
@BOTH
@pytest.mark.parametrize("what", IN_PLACE)
def test_in_place(what: str, ranks: int, options: dict[str, str]) -> None:
    assert_sound(InPlace(what), (torch.randn(4, 12),), ranks=ranks, **options)


@pytest.mark.parametrize("what", IN_PLACE)
@pytest.mark.parametrize("split", ["column", "row"])
def test_in_place_before_a_layer_that_is_split(what: str, split: str) -> None:
    constraints = {"a.weight": "column", "b.weight": split}
    assert_sound(InPlace(what), (torch.randn(4, 12),), constraints=constraints)


class Written(nn.Module):
    """What holds nothing that is trained until something trained is written to it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.a, self.b = what, nn.Linear(12, 12), nn.Linear(12, 24)
        self.token = parameter(12)
        self.register_buffer("zeros", torch.zeros(4, 12))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.what == "zeros":
            z = torch.zeros_like(y)
            for i in range(4):
                z[i] = y[i] * (i + 1) + (z[i - 1].clone() if i else 0)
        elif self.what == "input":
            z = x
            z[0] = self.token
        elif self.what == "buffer":
            z = self.zeros.clone()
            z[:, 3:6] = y[:, :3]
        else:
            with torch.no_grad():
                z = torch.zeros_like(y)
            view = z.t()
            view[2].copy_(y.sum(1))
        return self.b(z)


@pytest.mark.parametrize("split", ["column", "row"])
@pytest.mark.parametrize("what", ["zeros", "input", "buffer", "view"])
def test_gradients_flow_through_what_is_written(what: str, split: str) -> None:
    assert_sound(Written(what), (torch.randn(4, 12),), constraints={"b.weight": split})


class InputIsWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        y = self.a(x)
        x.mul_(2)
        return y + x


@BOTH
def test_an_input_that_is_written_to_is_written_to(options: dict[str, str]) -> None:
    model, x = InputIsWritten().double(), torch.randn(4, 12, dtype=torch.float64)
    sharded = autoshard.autoshard(model, 2, (x,), **options)
    mine, theirs = x.clone(), x.clone()
    torch.testing.assert_close(sharded(mine), model(theirs))
    torch.testing.assert_close(mine, theirs)


# --- embeddings, parameters of other kinds ----------------------------------------------------------


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
def test_embedding_max_norm(ranks: int, options: dict[str, str]) -> None:
    """The table is written to in forward: it is whole, and written to once."""
    sharded = assert_sound(
        Embedded(max_norm=1.0), (torch.randint(0, 24, (2, 12)),), ranks=ranks, **options
    )
    assert placements(sharded.plan)["emb.weight"] == "I"


class RescalesWeights(nn.Module):
    """A trained weight that forward writes to, by way of a view, between two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(x).detach()
        with torch.no_grad():
            self.b.weight.div_(2)
            self.b.weight[:3].add_(1)
            self.a.bias.zero_()
        return self.a(x) * self.b(x) + y


@RANKS
@BOTH
def test_weights_that_forward_writes_to(ranks: int, options: dict[str, str]) -> None:
    assert_sound(RescalesWeights(), (torch.randn(4, 12),), ranks=ranks, **options)


class MovingAverage(nn.Module):
    """A frozen weight that forward itself moves."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 12)
        self.slow = nn.Parameter(torch.randn(12, 12), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.mul_(0.9).add_(self.a.weight, alpha=0.1)
        return self.a(x) + x @ self.slow


@RANKS
@BOTH
def test_a_frozen_weight_that_forward_moves(ranks: int, options: dict[str, str]) -> None:
    assert_sound(MovingAverage(), (torch.randn(4, 12),), ranks=ranks, **options)


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


# --- calls --------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) * self.b(y).tanh()


def test_the_same_tensor_passed_twice_is_two_inputs() -> None:
    model, x = TwoInputs().double(), torch.randn(4, 12, dtype=torch.float64)
    sharded = autoshard.autoshard(model, 2, (x, x), **IDEAL_TENSOR)
    assert len(sharded.plan.inputs) == 2
    y = torch.randn(4, 12, dtype=torch.float64)
    torch.testing.assert_close(sharded(x, y), model(x, y))
    torch.testing.assert_close(sharded(x, x), model(x, x))


@BOTH
def test_gradients_of_inputs(options: dict[str, str]) -> None:
    model = TwoInputs().double()
    x, y = (torch.randn(4, 12, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sharded = autoshard.autoshard(model, 2, (x, y), **options)
    wanted = torch.autograd.grad(model(x, y).sum(), (x, y))
    found = torch.autograd.grad(sharded(x, y).sum(), (x, y))
    torch.testing.assert_close(found, wanted)


def test_world_size_1_is_the_identity() -> None:
    model = TwoBranches()
    sharded = assert_sound(model, (torch.randn(2, 5, 24),), ranks=1)
    assert not kinds(sharded)
    assert {w.split for w in sharded.plan.weights} == {"replicated"}


def test_a_sharded_module_is_not_sharded_again() -> None:
    model, x = nn.Linear(12, 12), torch.randn(4, 12)
    sharded = autoshard.autoshard(model, 2, (x,))
    for call in (autoshard.autoshard, autoshard.plan, autoshard.verify):
        with pytest.raises(OptionsError, match="sharded already"):
            call(sharded, 2, (x,))


def test_a_constraint_that_matches_nothing_names_the_nearest() -> None:
    model, x = nn.Sequential(nn.Linear(12, 12)), torch.randn(4, 12)
    with pytest.raises(ConstraintError, match="matches no parameter") as caught:
        autoshard.plan(model, 2, (x,), constraints={"net.0.weight": "row"})
    assert caught.value.where == "net.0.weight"
    assert "0.weight" in caught.value.fix


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.sum() > 0:
            return y
        return -y


def test_control_flow_on_values_is_an_error_at_the_line() -> None:
    with pytest.raises(CaptureError, match=r"if y\.sum\(\) > 0:") as caught:
        autoshard.plan(Branching(), 2, (torch.randn(4, 12),))
    assert "test_pitfalls.py" in caught.value.where
    assert "torch.where" in caught.value.fix
