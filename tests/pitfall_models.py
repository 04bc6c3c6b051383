"""The smallest models on which tensor-parallel tools go wrong: for the simulator's tests and the processes'.

Sound means: outputs, every gradient, parameters after two steps and buffers equal the unsharded model's
(`oracle.assert_sound`), by sharding well or by leaving whole what cannot be split, and naming it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle import IDEAL_ALL, IDEAL_TENSOR
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard import ShardedModule

SLOW = pytest.mark.slow


RANKS = pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW)]
)


BOTH = pytest.mark.parametrize("options", [IDEAL_TENSOR, IDEAL_ALL], ids=["tensor", "all"])


def kinds(sharded: ShardedModule, module: str = "") -> list[str]:
    """The kinds of the plan's collectives in modules that start with `module`."""
    found = sharded.plan.collectives
    return [c.kind for c in found if c.kind and c.module.startswith(module)]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


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


class HeadsOutside(FusedQkv):
    """The same weight shape, but three per head: a plain cut of the heads."""

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        cut = x.unflatten(-1, (self.heads, 3, self.size))
        return tuple(part.transpose(1, 2) for part in cut.unbind(3))


class GateUp(nn.Module):
    def __init__(self, width: int = 12, hidden: int = 24) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


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


class TiedHead(nn.Module):
    def __init__(self, vocabulary: int = 24, width: int = 12) -> None:
        super().__init__()
        self.emb, self.mid = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.mid(self.emb(ids)).tanh())
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Between(nn.Module):
    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.a, self.between, self.b = nn.Linear(12, 24), between, nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


class DividedByNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True) + F.normalize(x, dim=-1)


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


class NormOfEachHead(FusedQkv):
    def __init__(self) -> None:
        super().__init__(24, 6)
        self.q_norm, self.k_norm = nn.LayerNorm(self.size), nn.RMSNorm(self.size)

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().cut(x)
        return self.q_norm(q), self.k_norm(k), v


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


class Loss(nn.Module):
    def __init__(self, classes: int, **options: Any) -> None:
        super().__init__()
        self.head, self.options = nn.Linear(12, classes), options

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target, **self.options)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.out = norm, nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


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


class Language(nn.Module):
    def __init__(self, vocabulary: int, width: int = 12) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.emb(ids))
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


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
