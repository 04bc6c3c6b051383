"""Sequences and sets: attention of every kind, recurrences, scans, experts, graphs, queries."""

from __future__ import annotations

import math

import torch
from architectures import case
from torch import Tensor, nn
from torch.nn import functional as F


def heads_of(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class Rotary(nn.Module):
    """A Llama-like layer: rotary embeddings, fewer key/value heads repeated, a gated MLP, RMS norms."""

    def __init__(self, width: int = 12, heads: int = 3, kv_heads: int = 1, gate: str = "silu"):
        super().__init__()
        self.heads, self.kv_heads, self.gate, size = heads, kv_heads, gate, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * size, bias=False) for _ in range(2))
        self.n1, self.n2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.gate_up, self.down = nn.Linear(width, 32), nn.Linear(16, width)
        frequencies = 1.0 / 100 ** (torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(8.0), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        turned, length = torch.cat((-b, a), -1), x.shape[-2]
        return x * self.cos[:length] + turned * self.sin[:length]

    def forward(self, x: Tensor) -> Tensor:
        y = self.n1(x)
        q, k = self.rotate(heads_of(self.q(y), self.heads)), heads_of(self.k(y), self.kv_heads)
        k, v = self.rotate(k), heads_of(self.v(y), self.kv_heads)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(getattr(F, self.gate)(gate) * up)


@case
def multi_query_of_three_heads():
    return nn.Sequential(Rotary(), Rotary(gate="gelu")), torch.randn(2, 5, 12)


@case
def grouped_queries_of_six_heads():
    return Rotary(24, 6, 2, "sigmoid"), torch.randn(2, 4, 24)


class Alibi(nn.Module):
    """Attention by hand: slopes per head, a causal mask of infinities, rows that see nothing."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.qkv, self.o = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, heads + 1))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).split(x.shape[-1], -1))
        at = torch.arange(x.shape[1])
        score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        score = score - self.slopes.view(-1, 1, 1) * (at[:, None] - at).abs()
        hidden = torch.triu(torch.ones(len(at), len(at), dtype=torch.bool), 1)
        score = score.masked_fill(hidden | ~keep[:, None, None], float("-inf"))
        weight = torch.nan_to_num(score.softmax(-1), 0.0)  # a row of infinities alone
        return self.o((weight @ v).transpose(1, 2).reshape(x.shape))


@case
def alibi_and_rows_fully_masked():
    keep = torch.tensor([[False, True, True, True], [True, True, False, True]])
    return Alibi(), torch.randn(2, 4, 12), keep


class RelativeBias(nn.Module):
    """T5's buckets: a bias gathered from an embedding, and Transformer-XL's shift."""

    def __init__(self, width: int = 8, heads: int = 2, length: int = 5) -> None:
        super().__init__()
        self.heads, self.qk, self.v = heads, nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.buckets = nn.Embedding(2 * length - 1, heads)
        self.positions = nn.Parameter(torch.randn(heads, length, width // heads))

    def shift(self, x: Tensor) -> Tensor:
        b, h, s, _ = x.shape
        return F.pad(x, (1, 0)).view(b, h, -1, s)[:, :, 1:].view(b, h, s, -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (heads_of(t, self.heads) for t in self.qk(x).chunk(2, -1))
        at = torch.arange(x.shape[1])
        bias = self.buckets(at[None] - at[:, None] + x.shape[1] - 1).permute(2, 0, 1)
        score = torch.einsum("bhid,bhjd->bhij", q, k) + bias
        score = score + self.shift(torch.einsum("bhid,hjd->bhij", q, self.positions))
        y = score.softmax(-1) @ heads_of(self.v(x), self.heads)
        return y.permute(0, 2, 1, 3).contiguous().view(x.shape)


@case
def relative_position_bias():
    return RelativeBias(), torch.randn(2, 5, 8)


class LinearAttention(nn.Module):
    """Features elu+1, once whole and once causal by running sums."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.o = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        whole = q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2).unsqueeze(-1))
        state = torch.einsum("bhsd,bhse->bhsde", k, v).cumsum(2)
        norm = torch.einsum("bhsd,bhsd->bhs", q, k.cumsum(2))
        causal = torch.einsum("bhsd,bhsde->bhse", q, state) / norm.unsqueeze(-1)
        return self.o((whole + causal).transpose(1, 2).flatten(2))


@case
def linear_attention():
    return LinearAttention(), torch.randn(2, 4, 8)


class Mamba(nn.Module):
    """A selective scan: causal depthwise convolution, softplus steps, a loop over time."""

    def __init__(self, width: int = 6, inner: int = 8, state: int = 3) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * inner)
        self.conv = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.x_proj, self.dt = nn.Linear(inner, 2 + 2 * state), nn.Linear(2, inner)
        self.a_log = nn.Parameter(torch.rand(inner, state))
        self.d, self.out = nn.Parameter(torch.ones(inner)), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.proj(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        dt, b, c = self.x_proj(u).split([2, 3, 3], -1)
        dt = F.softplus(self.dt(dt))
        decay = torch.exp(dt.unsqueeze(-1) * -self.a_log.exp())
        given = (dt * u).unsqueeze(-1) * b.unsqueeze(2)
        h, made = torch.zeros_like(given[:, 0]), []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + given[:, t]
            made.append((h * c[:, t].unsqueeze(1)).sum(-1))
        return self.out((torch.stack(made, 1) + u * self.d) * F.silu(z))


@case
def selective_scan():
    return Mamba(), torch.randn(2, 4, 6)


class Recurrent(nn.Module):
    """Embedding, bidirectional LSTM, GRU, a cell stepped by hand, an additive attention."""

    def __init__(self, width: int = 6, hidden: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, width, padding_idx=0)
        self.lstm = nn.LSTM(width, hidden, 2, bidirectional=True, batch_first=True)
        self.gru, self.cell = nn.GRU(2 * hidden, hidden, batch_first=True), nn.LSTMCell(hidden, 5)
        self.score, self.head = nn.Linear(5, 1), nn.Linear(5, 11)

    def forward(self, ids: Tensor) -> Tensor:
        y, _ = self.gru(self.lstm(self.emb(ids))[0])
        state, made = None, []
        for x in y.unbind(1):
            state = self.cell(x, state)
            made.append(state[0])
        steps = torch.stack(made, 1)
        return self.head((torch.tanh(self.score(steps)).softmax(1) * steps).sum(1))


@case
def recurrent_layers():
    return Recurrent(), torch.randint(11, (3, 4))


class OneHotExperts(nn.Module):
    """Switch-like: one-hot dispatch with a capacity, batched expert weights, a balancing loss."""

    def __init__(
        self, width: int = 6, experts: int = 3, hidden: int = 8, capacity: int = 3
    ) -> None:
        super().__init__()
        self.router, self.capacity = nn.Linear(width, experts, bias=False), capacity
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.router(x).softmax(-1)
        gate, chosen = share.max(-1)
        hot = F.one_hot(chosen, share.shape[-1])
        place = (hot.cumsum(0) - 1) * hot
        fits = (place < self.capacity) & hot.bool()
        slots = F.one_hot(place.clamp(max=self.capacity - 1), self.capacity) * fits[..., None]
        slots = slots.to(x.dtype)
        given = torch.einsum("tec,td->ecd", slots, x)
        made = torch.bmm(F.relu(torch.bmm(given, self.up)), self.down)
        y = torch.einsum("tec,ecd->td", slots * gate[:, None, None], made)
        balance = (hot.to(x.dtype).mean(0) * share.mean(0)).sum() * share.shape[-1]
        return x + y, balance


@case
def experts_by_one_hot():
    return OneHotExperts(), torch.randn(7, 6)


class IndexedExperts(nn.Module):
    """Every expert on every token, the chosen ones gathered; and added back by index."""

    def __init__(self, width: int = 6, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, 8), nn.SiLU(), nn.Linear(8, width))
                for _ in range(experts)
            ]
        )
        self.shared = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        made = torch.stack([expert(x) for expert in self.experts], 1)
        picked = made.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
        rows = torch.arange(len(x)).repeat_interleave(2)
        out = torch.zeros_like(x).index_add_(0, rows, (picked * weight[..., None]).flatten(0, 1))
        return out + self.shared(x)


@case
def experts_by_index_add():
    return IndexedExperts(), torch.randn(5, 6)


class CrossAttention(nn.Module):
    """An encoder and a decoder with padding and causal masks, as torch has them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(9, width), nn.Embedding(7, width)
        self.core = nn.Transformer(width, 2, 1, 1, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 7)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = self.core.generate_square_subsequent_mask(target.shape[1], dtype=torch.float64)
        pad = torch.zeros(source.shape, dtype=torch.float64).masked_fill(source == 0, -1e9)
        x, y = self.source(source), self.target(target)
        out = self.core(x, y, None, causal, None, pad, None, pad, False, True)
        return self.head(out)


@case
def encoder_and_decoder():
    source = torch.tensor([[3, 4, 0, 0], [1, 2, 3, 4]])
    return CrossAttention(), source, torch.randint(7, (2, 3))


class Detr(nn.Module):
    """Learnt queries look at features; boxes and classes come out."""

    def __init__(self, width: int = 8, queries: int = 5) -> None:
        super().__init__()
        self.backbone, self.queries = nn.Conv2d(3, width, 3, 2, 1), nn.Embedding(queries, width)
        self.row, self.column = (nn.Parameter(torch.rand(4, width // 2)) for _ in range(2))
        self.cross = nn.MultiheadAttention(width, 2, batch_first=True)
        self.classes, self.boxes = nn.Linear(width, 4), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.backbone(x)
        height, wide = h.shape[-2:]
        at = torch.cat([
            self.column[:wide].unsqueeze(0).repeat(height, 1, 1),
            self.row[:height].unsqueeze(1).repeat(1, wide, 1),
        ], -1).flatten(0, 1)  # fmt: skip
        memory = h.flatten(2).permute(0, 2, 1) + at
        q = self.queries.weight.unsqueeze(0).expand(len(x), -1, -1)
        y = q + self.cross(q, memory, memory)[0]
        return {"pred_logits": self.classes(y), "pred_boxes": self.boxes(y).sigmoid()}


@case
def learnt_queries():
    return Detr(), torch.randn(2, 3, 6, 4)


class GraphNetwork(nn.Module):
    """Messages along edges, summed by index_add, scatter_reduce and a degree norm; graph pooling."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, 8), nn.GRUCell(8, width)
        self.attention, self.head = nn.Linear(8, 1), nn.Linear(width, 3)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        source, target = edges
        m = F.leaky_relu(self.message(torch.cat([x[source], x[target]], -1)))
        score = self.attention(m).squeeze(-1).exp()
        total = torch.zeros(len(x), dtype=x.dtype).index_add(0, target, score)
        m = m * (score / total[target]).unsqueeze(-1)
        got = torch.zeros(len(x), 8, dtype=x.dtype).index_add_(0, target, m)
        most = torch.full_like(got, -10.0).scatter_reduce(
            0, target[:, None].expand_as(m), m, "amax", include_self=True
        )
        degree = F.one_hot(target, len(x)).sum(0).clamp(min=1).to(x.dtype)
        x = self.update(got + most / degree[:, None], x)
        pooled = torch.zeros(2, x.shape[1], dtype=x.dtype).scatter_add_(
            0, graph[:, None].expand_as(x), x
        )
        return self.head(pooled)


@case
def graph_network():
    edges = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 0, 4, 3, 2]])
    return GraphNetwork(), torch.randn(5, 6), edges, torch.tensor([0, 0, 0, 1, 1])


class Glus(nn.Module):
    """Gates of each kind: GLU, ReGLU with two layers, bilinear, an interleaved one."""

    def __init__(self, width: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 2 * hidden), nn.Linear(width, 2 * hidden)
        self.w, self.v = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        odd = self.b(x)
        y = F.glu(self.a(x), -1) + self.w(x).relu() * self.v(x)
        return self.out(y + odd[..., ::2] * odd[..., 1::2].clamp(-2, 2).sigmoid())


@case
def gated_units():
    return Glus(), torch.randn(2, 3, 6)


class DoubleTask(nn.Module):
    """Two losses over one body, teacher forcing by shifts, lengths by masks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tokens = nn.Linear(5, 8), nn.Linear(8, 7)

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.tokens(torch.tanh(self.body(x)))
        kept = torch.arange(x.shape[1]) < lengths[:, None]
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), targets[:, 1:], reduction="none")
        mean = (loss * kept[:, 1:]).sum() / kept[:, 1:].sum().clamp(min=1)
        return mean, F.multi_margin_loss(logits[:, 0], targets[:, 0])


@case
def losses_over_lengths():
    targets = torch.tensor([[1, 2, 3, 4, 5], [6, 5, 4, 3, 2], [1, 3, 5, 2, 4]])
    return DoubleTask(), torch.randn(3, 5, 5), targets, torch.tensor([5, 3, 4])
