"""Weights in other roles than a layer's own: adapters, parametrizations, plain tensors, ties, frozen ones."""

from __future__ import annotations

import torch
from architectures import case
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.3)


class Lora(nn.Module):
    """A frozen layer and a trained product of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 3, alpha: float = 6.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.a, self.b = weight(rank, base.in_features), weight(base.out_features, rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.T @ self.b.T) * self.scale


@case
def lora_by_hand():
    up, down = Lora(nn.Linear(8, 12)), Lora(nn.Linear(12, 8))
    return nn.Sequential(up, nn.GELU(), down, nn.LayerNorm(8)), torch.randn(2, 5, 8)


class MergedLora(Lora):
    """The product is added to the weight."""

    def forward(self, x: Tensor) -> Tensor:
        merged = self.base.weight + self.scale * self.b @ self.a
        return F.linear(x, merged, self.base.bias)


@case
def lora_merged_in_forward():
    model = nn.Sequential(MergedLora(nn.Linear(8, 12)), nn.SiLU(), MergedLora(nn.Linear(12, 8)))
    return model, torch.randn(3, 8)


class Dora(Lora):
    """The merged weight has a direction, and a magnitude for each output."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        self.magnitude = nn.Parameter(base.weight.norm(dim=1).clone())

    def forward(self, x: Tensor) -> Tensor:
        merged = self.base.weight + self.scale * self.b @ self.a
        length = merged.norm(p=2, dim=1, keepdim=True).detach()
        return F.linear(x, self.magnitude[:, None] * merged / length, self.base.bias)


@case
def dora():
    return nn.Sequential(Dora(nn.Linear(8, 12)), nn.ReLU(), Dora(nn.Linear(12, 8))), torch.randn(
        4, 8
    )


@case
def weight_norm():
    up = parametrizations.weight_norm(nn.Linear(8, 12))
    conv = parametrizations.weight_norm(nn.Conv1d(12, 6, 3, padding=1))
    return nn.Sequential(up, nn.GELU(), nn.Unflatten(0, (2, 4)), _Swap(), conv), torch.randn(8, 8)


class _Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@case
def spectral_norm():
    """Power iterations move buffers at every call in train mode."""
    up, down = (
        parametrizations.spectral_norm(nn.Linear(8, 12)),
        parametrizations.spectral_norm(nn.Linear(12, 8)),
    )
    return nn.Sequential(up, nn.Tanh(), down), torch.randn(4, 8)


@case
def old_spectral_and_weight_norm():
    up = nn.utils.spectral_norm(nn.Linear(8, 12))
    return nn.Sequential(up, nn.Tanh(), nn.Linear(12, 8)), torch.randn(4, 8)


@case
def orthogonal():
    up = parametrizations.orthogonal(nn.Linear(6, 8), orthogonal_map="cayley")
    return nn.Sequential(up, nn.Tanh(), nn.Linear(8, 4)), torch.randn(4, 6)


class _Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


@case
def symmetric_weight():
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), layer, nn.ReLU(), layer), torch.randn(3, 4)


class PlainTensors(nn.Module):
    """Weights that are transposed, summed, normalised, multiplied with one another, penalised."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = weight(12, 8), weight(12, 6), weight(5, 6)
        self.mix, self.gate = weight(4), weight(12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = torch.einsum("hi,ho->io", self.a, self.b)
        y = x @ product * self.mix.softmax(0)[1] + self.a.sum() + self.b.mean(0)
        z = (x @ self.a.T * torch.sigmoid(self.gate)) @ F.normalize(self.b, dim=0)
        penalty = sum(p.pow(2).sum() for p in self.parameters()) * 1e-2
        return torch.cat([y, z, y @ self.c.T], -1), penalty + self.c.abs().max()


@case
def weights_as_plain_tensors():
    return PlainTensors(), torch.randn(3, 8)


class StackedWeights(nn.Module):
    """Weights of several layers are stacked and used by one batched product, and indexed."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([weight(8, 6) for _ in range(3)])
        self.named = nn.ParameterDict({"scale": weight(6), "shift": weight(3, 1, 6)})
        self.chosen = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(x.expand(3, -1, -1), torch.stack(list(self.parts)))
        y = y * self.named["scale"] + self.named["shift"]
        rows = self.chosen.weight[torch.tensor([2, 0])]
        return (y @ rows.T).relu() @ self.parts[0][:2, :].mul(2.0)


@case
def parameter_list_and_dict():
    return StackedWeights(), torch.randn(1, 5, 8)


class TiedLanguageModel(nn.Module):
    """The embedding is the head, transposed once more for a second use."""

    def __init__(self, vocabulary: int = 11, width: int = 6) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(self.emb(ids)))
        logits = self.head(x)
        again = logits.softmax(-1) @ self.emb.weight
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), again


@case
def tied_embedding_both_ways():
    return TiedLanguageModel(), torch.randint(11, (2, 5)), torch.randint(11, (2, 5))


class Block(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Albert(nn.Module):
    """One block called three times, and one module known by two names."""

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.layers = nn.ModuleList([block, Block(), block])
        self.paths = nn.ModuleDict({"main": nn.Sequential(block, nn.ReLU()), "other": block})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.paths["main"](x) + self.paths["other"](x)


@case
def the_same_block_again_and_again():
    return Albert(), torch.randn(2, 3, 8)


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's weight transposed, and its frozen half is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.bias = nn.Linear(9, 6), weight(9)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.enc(x))
        return F.linear(hidden, self.enc.weight.t(), self.bias) + hidden @ self.enc.weight.detach()


@case
def tied_autoencoder():
    return TiedAutoencoder(), torch.randn(4, 9)


@case
def partially_frozen():
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 5))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or name.startswith("2") or name.endswith("0.up"))
    model[0].up.bias.requires_grad_(True)
    return model, torch.randn(2, 8)


@case
def frozen_below_a_trained_head():
    body = nn.Sequential(Block(), Block()).requires_grad_(False)
    return nn.Sequential(body, nn.Linear(8, 5)), torch.randn(2, 3, 8)


class HyperNetwork(nn.Module):
    """The weights of a layer are another layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.make = weight(4), nn.Linear(4, 6 * 8 + 6)

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.make(self.code).split([48, 6])
        return F.linear(x, w.view(6, 8), b).relu()


@case
def hypernetwork():
    return HyperNetwork(), torch.randn(3, 8)


class Quantised(nn.Module):
    """Straight-through rounding of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.out = weight(12, 8), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.w.detach().abs().amax(1, keepdim=True) / 7
        rounded = (self.w / scale).round().clamp(-7, 7) * scale
        return self.out(F.linear(x, self.w + (rounded - self.w).detach()).relu())


@case
def straight_through_quantisation():
    return Quantised(), torch.randn(3, 8)


class Cosine(nn.Module):
    """An ArcFace-like head: normalised weights, a margin for the right class."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.w = nn.Linear(6, 8), weight(7, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.w))
        margin = F.one_hot(labels, 7) * 0.3
        return F.cross_entropy((cosine - margin) * 4.0, labels, label_smoothing=0.1)


@case
def cosine_margin_head():
    return Cosine(), torch.randn(4, 6), torch.tensor([0, 6, 3, 3])


class LayerScale(nn.Module):
    """Scalars and vectors as weights: a 0-d temperature, ReZero, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.alpha = Block(), nn.Parameter(torch.tensor(0.3))
        self.gamma, self.temperature = weight(8), nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.alpha * self.block(x) * self.gamma
        return (y / self.temperature.exp().clamp(max=100)).log_softmax(-1)


@case
def scalar_weights():
    return LayerScale(), torch.randn(2, 3, 8)
