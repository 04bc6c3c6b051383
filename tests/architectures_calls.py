"""What is written to, and how models are called: buffers, in-place chains, autocast, checkpointing, outputs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from architectures import case
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass
from torch.utils.checkpoint import checkpoint


class Ema(nn.Module):
    """A codebook moved by an exponential average, a running mean, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("codes", torch.randn(5, 12))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
                self.calls += 1
                hot = F.one_hot((h @ self.codes.T).argmax(-1), 5).to(h.dtype)
                self.codes.lerp_(hot.T @ h, 0.1)
        return self.down(h - self.mean)


@case
def exponential_averages():
    return Ema(), torch.randn(4, 6)


@case
def batch_norm_of_each_kind():
    conv = nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(6, momentum=0.3), nn.ReLU())
    rest = nn.Sequential(nn.Flatten(), nn.Linear(30, 8), nn.BatchNorm1d(8, affine=False))
    return nn.Sequential(conv, nn.InstanceNorm1d(6, affine=True), rest), torch.randn(4, 3, 5)


class Cache(nn.Module):
    """Keys and values are written to a cache at the given positions."""

    def __init__(self, width: int = 8, heads: int = 2, length: int = 6) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out, self.heads = nn.Linear(width, width), heads
        self.register_buffer("keys", torch.zeros(2, heads, length, width // heads))
        self.register_buffer("values", torch.zeros(2, heads, length, width // heads))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    @torch.no_grad()
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        k, v = map(self.split, self.kv(x).chunk(2, -1))
        self.keys.index_copy_(2, at, k)
        self.values[:, :, at] = v
        seen = torch.arange(self.keys.shape[2]) <= at[:, None]
        y = F.scaled_dot_product_attention(
            self.split(self.q(x)), self.keys, self.values, attn_mask=seen
        )
        return self.out(y.transpose(1, 2).flatten(2))


@case
def key_value_cache():
    return Cache(), torch.randn(2, 2, 8), torch.tensor([1, 2])


class InPlace(nn.Module):
    """Chains of writes to activations, to slices of them, through masks and by index."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).add_(0.1).mul_(2).relu_()
        z = self.b(y).clone()
        z[:, 2:7] *= 0.5
        z[:, 0] = y[:, 1]
        z[x.sum(-1) > 0] = 1.0
        z.masked_fill_(z > 3, 3.0).clamp_(min=-2)
        z += y
        out = torch.empty(len(x), 24, dtype=x.dtype)
        out[:, :12], out[:, 12:] = z, y
        out.view(-1, 2, 12)[:, 1].neg_()
        return F.dropout(self.c(out[:, 6:18]), 0.3, training=False).squeeze_()


@case
def in_place_chains():
    return InPlace(), torch.randn(4, 6)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(3)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


@case
def gradient_checkpointing():
    return Checkpointed(), torch.randn(3, 8, requires_grad=True)


class ByShape(nn.Module):
    """Control flow by shapes and by flags, loops, and a plain number among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 12), nn.Linear(8, 4)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor, steps: int = 2, mask: Tensor | None = None) -> Tensor:
        h = self.wide(x) if x.shape[1] > 3 else F.pad(self.narrow(x), (0, 8))
        for i in range(steps):
            h = h.sin() if i % 2 else h.cos() * (i + 1)
        if mask is not None:
            h = h * mask[..., None]
        return self.out(h) / len(x) ** 0.5


@case
def control_flow_by_shapes():
    return ByShape(), torch.randn(2, 5, 8), {"steps": 3}


@case
def optional_inputs_none_and_given():
    return ByShape(), torch.randn(2, 2, 8), {"mask": torch.rand(2, 2), "steps": 1}


@dataclass
class Result:
    """What a model gives back."""

    loss: Tensor
    hidden: tuple[Tensor, ...]
    extra: Tensor | None = None


register_dataclass(Result, field_names=["loss", "hidden", "extra"], drop_field_names=[])


class Structured(nn.Module):
    """Nested inputs, and outputs in a dataclass, with None and the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(8, 6)})
        self.net = nn.Sequential(OrderedDict(first=nn.Linear(6, 6), act=nn.Tanh()))

    def forward(self, *, batch: dict[str, Any], pair: tuple[Tensor, Tensor]) -> Result:
        h = self.layers["a"](batch["x"]) + batch["more"][0]
        y = self.net(self.layers["b"](h)) + pair[0] * pair[1]
        return Result((y - batch["x"]).pow(2).mean(), (h, y, h))


@case
def structured_inputs_and_outputs():
    twice = torch.randn(4, 6)
    batch = {"x": torch.randn(4, 6), "more": [torch.randn(8)]}
    return Structured(), {"batch": batch, "pair": (twice, twice)}


class Wrapper(nn.Module):
    """A training wrapper: the model and its loss in one, called by keywords alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(inplace=True), nn.Linear(12, 5))
        self.criterion = nn.CrossEntropyLoss(weight=torch.rand(5) + 0.5, ignore_index=-1)

    def forward(self, *, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(inputs)
        loss = self.criterion(logits, labels)
        return {"loss": loss, "probabilities": logits.detach().softmax(-1), "logits": logits}


@case
def loss_in_the_model_by_keywords():
    return Wrapper(), {"inputs": torch.randn(4, 6), "labels": torch.tensor([4, -1, 0, 2])}


class Contrastive(nn.Module):
    """CLIP's loss: normalised features of two towers, a learnt temperature, both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 6))
        self.text = nn.EmbeddingBag(9, 6, mode="mean")
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        i, t = (F.normalize(x, dim=-1) for x in (self.image(image), self.text(text)))
        logits = self.logit_scale.exp() * i @ t.t()
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


@case
def contrastive_loss():
    return Contrastive(), torch.randn(3, 3, 2, 2), torch.randint(9, (3, 4))


class Dlrm(nn.Module):
    """Embedding bags of sparse features, a dense tower, and their pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(n, 6, mode="sum") for n in (7, 11, 5)])
        self.dense, self.top = nn.Linear(4, 6), nn.Sequential(nn.Linear(12, 8), nn.ReLU())
        self.out = nn.Linear(8, 1)

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        x = F.relu(self.dense(dense))
        features = torch.stack(
            [x, *[bag(i, offsets) for bag, i in zip(self.bags, ids, strict=True)]], 1
        )
        products = torch.bmm(features, features.transpose(1, 2))
        row, column = torch.tril_indices(4, 4, -1)
        pairs = products[:, row, column]
        return torch.sigmoid(self.out(self.top(torch.cat([x, pairs], 1)))).squeeze(1)


@case
def dlrm():
    return Dlrm(), torch.randn(3, 4), torch.randint(5, (3, 7)), torch.tensor([0, 2, 5])
