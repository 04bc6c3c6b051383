"""Images, signals and fields: convolutions, norms by group, windows, resampling, Fourier transforms."""

from __future__ import annotations

import torch
from architectures import case
from torch import Tensor, nn
from torch.nn import functional as F


class UNet(nn.Module):
    """Down, up by interpolation and by a transposed convolution, skips concatenated."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.inc, self.down = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, 2, 1)
        self.mid = nn.Conv2d(2 * c, 2 * c, 3, padding=1)
        self.up, self.merge = (
            nn.ConvTranspose2d(2 * c, c, 2, 2),
            nn.Conv2d(4 * c, c, 3, padding=1),
        )
        self.out = nn.Conv2d(c, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.inc(x))
        b = F.relu(self.down(a))
        m = F.relu(self.mid(F.max_pool2d(b, 2)))
        wide = F.interpolate(m, scale_factor=4, mode="bilinear", align_corners=False)
        y = torch.cat([a, self.up(b), wide], 1)
        return self.out(F.relu(self.merge(y)))


@case
def unet():
    return UNet(), torch.randn(2, 3, 8, 8)


class DiffusionBlock(nn.Module):
    """Group norm, SiLU, a shift and scale from the time embedding, self attention over space."""

    def __init__(self, c: int = 8, groups: int = 4) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, c), nn.Conv2d(c, c, 3, padding=1)
        self.time, self.norm2 = nn.Linear(6, 2 * c), nn.GroupNorm(groups, c)
        self.conv2, self.qkv, self.proj = (
            nn.Conv2d(c, c, 3, padding=1),
            nn.Conv2d(c, 3 * c, 1),
            nn.Conv2d(c, c, 1),
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        freq = torch.exp(-torch.arange(3, dtype=x.dtype))
        emb = torch.cat([(t[:, None] * freq).sin(), (t[:, None] * freq).cos()], -1)
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(emb))[:, :, None, None].chunk(2, 1)
        h = self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift)) + x
        b, c, height, width = h.shape
        q, k, v = self.qkv(h).reshape(b, 3, 2, c // 2, height * width).unbind(1)
        weight = torch.einsum("bhct,bhcs->bhts", q, k).mul((c // 2) ** -0.5).softmax(-1)
        y = torch.einsum("bhts,bhcs->bhct", weight, v).reshape(b, c, height, width)
        return h + self.proj(y)


@case
def diffusion_block():
    return DiffusionBlock(), torch.randn(2, 8, 4, 4), torch.rand(2)


class MobileBlock(nn.Module):
    """Expansion, depthwise convolution, squeeze-excite, projection; batch norm after each."""

    def __init__(self, c: int = 4, e: int = 12) -> None:
        super().__init__()
        self.expand = nn.Sequential(
            nn.Conv2d(c, e, 1, bias=False), nn.BatchNorm2d(e), nn.Hardswish()
        )
        self.depth = nn.Sequential(
            nn.Conv2d(e, e, 3, padding=1, groups=e), nn.BatchNorm2d(e), nn.ReLU6()
        )
        self.squeeze = nn.Sequential(nn.Conv2d(e, 3, 1), nn.ReLU(), nn.Conv2d(3, e, 1))
        self.project = nn.Sequential(nn.Conv2d(e, c, 1, bias=False), nn.BatchNorm2d(c))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        y = y * F.hardsigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))
        return x + self.project(y)


@case
def depthwise_separable_with_squeeze_excite():
    return MobileBlock(), torch.randn(3, 4, 5, 5)


@case
def pixel_shuffle():
    model = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(3))
    return nn.Sequential(model, nn.PixelUnshuffle(2), nn.Conv2d(12, 4, 1)), torch.randn(2, 3, 4, 4)


class Swin(nn.Module):
    """Windows, a cyclic shift by roll, a bias looked up by relative position, a mask of regions."""

    def __init__(self, c: int = 6, heads: int = 3, size: int = 2) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.norm, self.qkv, self.proj = (
            nn.LayerNorm(c),
            nn.Linear(c, 3 * c),
            nn.Linear(c, c),
        )
        self.table = nn.Parameter(torch.randn((2 * size - 1) ** 2, heads) * 0.2)
        at = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"))
        off = at.flatten(1)[:, :, None] - at.flatten(1)[:, None] + size - 1
        self.register_buffer("index", off[0] * (2 * size - 1) + off[1])
        self.register_buffer("mask", torch.where(torch.rand(4, 1, 4, 4) > 0.8, -100.0, 0.0))

    def windows(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        s = self.size
        x = x.view(b, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5)
        return x.contiguous().view(-1, s * s, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = self.windows(torch.roll(self.norm(x), (-1, -1), (1, 2)))
        q, k, v = (
            self.qkv(y).reshape(len(y), -1, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        )
        score = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        score = score + self.table[self.index.view(-1)].view(4, 4, -1).permute(2, 0, 1)
        score = (score.view(b, -1, self.heads, 4, 4) + self.mask).view(-1, self.heads, 4, 4)
        y = self.proj((score.softmax(-1) @ v).transpose(1, 2).reshape(len(y), -1, c))
        y = y.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return x + torch.roll(y, (1, 1), (1, 2))


@case
def swin_windows():
    return Swin(), torch.randn(2, 4, 4, 6)


class Axial(nn.Module):
    """Attention along rows, then along columns."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.rows = nn.MultiheadAttention(c, 2, batch_first=True)
        self.columns = nn.MultiheadAttention(c, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = x.reshape(b * h, w, c)
        x = x + self.rows(y, y, y, need_weights=False)[0].view(b, h, w, c)
        y = x.transpose(1, 2).reshape(b * w, h, c)
        y = self.columns(y, y, y, need_weights=True)[0]
        return x + y.view(b, w, h, c).transpose(1, 2)


@case
def axial_attention():
    return Axial(), torch.randn(2, 3, 5, 8)


class Mixer(nn.Module):
    """Products over patches and over channels."""

    def __init__(self, patches: int = 6, c: int = 8) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, c, 2, 2)
        self.tokens = nn.Sequential(nn.Linear(patches, 10), nn.GELU(), nn.Linear(10, patches))
        self.channels = nn.Sequential(nn.Linear(c, 12), nn.GELU(), nn.Linear(12, c))
        self.norms, self.head = nn.ModuleList([nn.LayerNorm(c) for _ in range(2)]), nn.Linear(c, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norms[1](x))
        return self.head(x.mean(1))


@case
def mlp_mixer():
    return Mixer(), torch.randn(2, 3, 4, 6)


class Fourier(nn.Module):
    """An FNO layer: complex weights times the low modes, and a pointwise path beside."""

    def __init__(self, c: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.lift, self.modes = nn.Linear(1, c), modes
        self.weights = nn.Parameter(torch.randn(c, c, modes, 2) * 0.2)
        self.skip, self.out = nn.Conv1d(c, c, 1), nn.Linear(c, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x).transpose(1, 2)
        spectrum = torch.fft.rfft(x, dim=-1)
        out = torch.zeros_like(spectrum)
        low, weights = spectrum[..., : self.modes], torch.view_as_complex(self.weights)
        out[..., : self.modes] = torch.einsum("bim,iom->bom", low, weights)
        y = torch.fft.irfft(out, n=x.shape[-1], dim=-1)
        return self.out(F.gelu(y + self.skip(x)).transpose(1, 2))


@case
def fourier_neural_operator():
    return Fourier(), torch.randn(2, 9, 1)


class Generator(nn.Module):
    """A DCGAN generator, and the discriminator that judges it."""

    def __init__(self, z: int = 6) -> None:
        super().__init__()
        self.generate = nn.Sequential(
            nn.ConvTranspose2d(z, 8, 3, 1, 0, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.judge = nn.Sequential(
            nn.Conv2d(3, 4, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            nn.LazyLinear(1),
        )
        self.judge(self.generate(torch.zeros(2, z, 1, 1)))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        image = self.generate(z)
        score = self.judge(image).squeeze(1)
        return image, F.binary_cross_entropy_with_logits(score, torch.ones_like(score))


@case
def gan():
    return Generator(), torch.randn(3, 6, 1, 1)


class Vae(nn.Module):
    """The noise is an input: what is drawn inside differs between two runs."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(10, 8), nn.Sequential(nn.Linear(4, 8), nn.ELU())
        self.out = nn.Linear(8, 10)

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        mean, log_var = self.encode(x).chunk(2, -1)
        y = self.out(self.decode(mean + noise * torch.exp(0.5 * log_var)))
        kl = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
        return {"loss": F.binary_cross_entropy(y.sigmoid(), x, reduction="sum") + kl, "y": y}


@case
def variational_autoencoder():
    return Vae(), torch.rand(3, 10), torch.randn(3, 4)


class VectorQuantiser(nn.Module):
    """The nearest code by `cdist`, straight through, with both of its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes = nn.Conv1d(3, 6, 3, padding=1), nn.Embedding(7, 6)
        self.decode = nn.Conv1d(6, 3, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x).transpose(1, 2)
        nearest = torch.cdist(z, self.codes.weight.unsqueeze(0)).argmin(-1)
        q = self.codes(nearest)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        return self.decode((z + (q - z).detach()).transpose(1, 2)), loss


@case
def vector_quantiser():
    return VectorQuantiser(), torch.randn(2, 3, 5)


class Prototypes(nn.Module):
    """Distances between samples and learnt prototypes, in several metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.prototypes = nn.Linear(6, 8), nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        z = self.body(x)
        return (
            -(torch.cdist(z, self.prototypes) ** 2),
            torch.cdist(z, self.prototypes, p=1),
            (z[:, None] - self.prototypes[None]).pow(2).sum(-1).softmax(-1),
            F.cosine_similarity(z[:, None], self.prototypes[None], dim=-1),
            F.pairwise_distance(z[:5], self.prototypes),
        )


@case
def distance_matrices():
    return Prototypes(), torch.randn(5, 6)


class Resampled(nn.Module):
    """Padding of each kind, grid sampling, unfold and fold, pooling with indices, 3-d convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.where = nn.Conv2d(2, 4, 3), nn.Linear(4, 6)
        self.patches, self.depth = nn.Linear(16, 16), nn.Conv3d(1, 2, (2, 3, 3), padding=(0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(F.pad(x, (1, 1, 1, 1), mode="reflect"))
        theta = self.where(y.mean((2, 3))).view(-1, 2, 3) * 0.1 + torch.eye(2, 3)
        y = F.grid_sample(y, F.affine_grid(theta, list(y.shape), False), align_corners=False)
        blocks = self.patches(F.unfold(y, 2, stride=2).transpose(1, 2)).transpose(1, 2)
        y = y + F.fold(blocks, y.shape[2:], 2, stride=2)
        return self.depth(y.unsqueeze(1)).amax(2)


@case
def resampling():
    return Resampled(), torch.randn(2, 2, 4, 4)
