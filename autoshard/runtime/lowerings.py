"""Programs of their own for strategies that are more than the operator on slices.

As conversions are, each is written over a communicator and one tensor for each rank carried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from autoshard.runtime.communicator import Communicator
from autoshard.runtime.conversions import partial_to_invariant
from autoshard.runtime.slicing import chunk

Tensors = Sequence[Tensor]
MEAN, SUM = 1, 2


def vocab_embedding(
    comm: Communicator, weights: Tensors, ids: Tensors, padding_idx: int, length: int
) -> list[Tensor]:
    """Look up the ids whose rows, of `length`, a rank holds; the rest are zeros. The results are shares."""
    found = []
    for weight, wanted, rank in zip(weights, ids, comm.ranks, strict=True):
        first, rows = chunk(length, rank, comm.size)
        own = wanted - first
        elsewhere = (own < 0) | (own >= rows)
        padding = padding_idx - first
        padding = padding if padding_idx >= 0 and 0 <= padding < rows else None
        rows_found = F.embedding(own.masked_fill(elsewhere, 0), weight, padding)
        found.append(rows_found.masked_fill(elsewhere.unsqueeze(-1), 0.0))
    return found


def expert_products(
    comm: Communicator, xs: Tensors, weights: Tensors, ends: Tensors
) -> list[Tensor]:
    """Multiply the rows of a rank's own experts; the rest are zeros. The ranks' results are shares.

    Rows `[s, i]` come in order of their experts, whose last rows end at `ends`; weights are a rank's, `[e/n, i, o]`.
    The rank's rows are rolled to the front, for the product takes its experts' rows from the first on.
    """
    found = []
    for x, weight, stops, rank in zip(xs, weights, ends, comm.ranks, strict=True):
        first, experts = chunk(stops.shape[0], rank, comm.size)
        start = stops[first - 1] if first else torch.zeros_like(stops[0])
        rows = torch.arange(x.shape[0], device=x.device)
        own = x.index_select(0, (rows + start) % x.shape[0])
        product = torch.ops.transformers.grouped_mm_fallback(
            own, weight, stops[first : first + experts] - start
        )
        found.append(product.index_select(0, (rows - start) % x.shape[0]))
    return found


def vocab_cross_entropy(
    comm: Communicator,
    logits: Tensors,
    target: Tensors,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    length: int,
) -> list[Tensor]:
    """Cross-entropy of logits whose `length` classes are split: only statistics of a row travel.

    loss = log Σ exp(z − m) + m − z[target], with m the row's maximum; smoothed by ε it is
    (1 − ε)·loss + ε·(log Σ exp(z − m) + m − mean z), as torch defines it.
    """
    at = 1 if logits[0].dim() > 1 else 0
    with torch.no_grad():
        peak = comm.all_reduce([z.amax(at) for z in logits], "max")
    shifted = [z - m.unsqueeze(at) for z, m in zip(logits, peak, strict=True)]
    starts = [chunk(length, rank, comm.size)[0] for rank in comm.ranks]
    own = [_picked(z, t, start, at) for z, t, start in zip(shifted, target, starts, strict=True)]
    parts = [[z.exp().sum(at), p] for z, p in zip(shifted, own, strict=True)]
    if label_smoothing:
        parts = [[*part, z.sum(at)] for part, z in zip(parts, shifted, strict=True)]
    sums = partial_to_invariant(comm, [torch.stack(part) for part in parts])
    return [
        _reduce(_row_loss(s, length, label_smoothing), t, reduction, ignore_index)
        for s, t in zip(sums, target, strict=True)
    ]


def _picked(shifted: Tensor, target: Tensor, start: int, at: int) -> Tensor:
    """The target's logit where this rank holds its class, from `start` on, else zero."""
    classes = shifted.shape[at]
    own = target - start
    elsewhere = (own < 0) | (own >= classes)
    picked = shifted.gather(at, own.masked_fill(elsewhere, 0).unsqueeze(at)).squeeze(at)
    return picked.masked_fill(elsewhere, 0.0)


def _row_loss(sums: Tensor, classes: int, smoothing: float) -> Tensor:
    log_total = sums[0].log()
    loss = log_total - sums[1]
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (log_total - sums[2] / classes)
    return loss


def _reduce(loss: Tensor, target: Tensor, reduction: int, ignore_index: int) -> Tensor:
    counts = target != ignore_index
    loss = loss.masked_fill(~counts, 0.0)
    if reduction == MEAN:
        return loss.sum() / counts.sum()
    return loss.sum() if reduction == SUM else loss


def mean_cross_entropy(
    comm: Communicator, logits: Tensors, target: Tensors, ignore_index: int, label_smoothing: float
) -> list[Tensor]:
    """The mean over rows that are split: each rank's sum over the count of all; shares."""
    counts = comm.all_reduce([(t != ignore_index).sum() for t in target])
    return [
        F.cross_entropy(
            z, t, reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        / count
        for z, t, count in zip(logits, target, counts, strict=True)
    ]


def share_of_mean(
    comm: Communicator, means: Tensors, xs: Tensors, dim: int, length: int
) -> list[Tensor]:
    """A rank's mean over its slice of `dim`, as its share of the mean over all of it, which is `length`."""
    return [
        mean * (x.shape[dim] / length) if x.shape[dim] else mean.nan_to_num() * 0
        for mean, x in zip(means, xs, strict=True)
    ]


def cut_reshape(
    comm: Communicator, xs: Tensors, shape: Sequence[int], dim: int, length: int
) -> list[Tensor]:
    """A reshape to `shape`, of whose dimension `dim` of `length` each rank has its slice."""
    return [
        x.reshape(_own(shape, dim, length, r, comm.size))
        for x, r in zip(xs, comm.ranks, strict=True)
    ]


def cut_expand(
    comm: Communicator, xs: Tensors, shape: Sequence[int], dim: int, length: int
) -> list[Tensor]:
    """As `cut_reshape`, of an expand."""
    return [
        x.expand(_own(shape, dim, length, r, comm.size))
        for x, r in zip(xs, comm.ranks, strict=True)
    ]


def _own(shape: Sequence[int], dim: int, length: int, rank: int, n: int) -> list[int]:
    own = list(shape)
    own[dim] = chunk(length, rank, n)[1]
    return own


def split_dropout(comm: Communicator, xs: Tensors, p: float) -> list[Tensor]:
    """Dropout with a mask of its own for each rank's slice, drawn from one seed that all share."""
    seed = _seed()
    found = []
    for x, rank in zip(xs, comm.ranks, strict=True):
        with _seeded(x, seed + rank):
            found.append(F.dropout(x, p, training=True))
    return found


def split_attention(
    comm: Communicator,
    q: Tensors,
    k: Tensors,
    v: Tensors,
    mask: Sequence[Tensor | None],
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> list[Tensor]:
    """Attention with dropout on split heads or batch: masks of their own for each rank."""
    seed = _seed()
    found = []
    for a, b, c, m, rank in zip(q, k, v, mask, comm.ranks, strict=True):
        with _seeded(a, seed + rank):
            found.append(
                F.scaled_dot_product_attention(
                    a, b, c, m, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            )
    return found


def _seed() -> int:
    """A seed drawn from the default generator, which all ranks keep in step."""
    return int(torch.randint(2**48, ()))


def _seeded(like: Tensor, seed: int):
    """A block in which the generator of `like`'s device is seeded, and restored afterwards."""
    return _Seeded([like.device] if like.device.type not in ("cpu", "meta") else [], seed)


class _Seeded:
    def __init__(self, devices: list[torch.device], seed: int) -> None:
        kind = devices[0].type if devices else "cuda"
        self._fork = torch.random.fork_rng(devices, device_type=kind)
        self._seed = seed

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(self._seed)

    def __exit__(self, *raised: object) -> None:
        self._fork.__exit__(*raised)  # type: ignore[arg-type]


ALL: dict[str, Callable[..., list[Tensor]]] = {
    f.__name__: f
    for f in (
        vocab_embedding,
        expert_products,
        vocab_cross_entropy,
        mean_cross_entropy,
        share_of_mean,
        cut_reshape,
        cut_expand,
        split_dropout,
        split_attention,
    )
}
