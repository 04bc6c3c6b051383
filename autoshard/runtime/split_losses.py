"""Losses whose classes or rows are split: statistics of rows travel, never the logits.

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
from autoshard.runtime.split_reductions import greatest, wide

Tensors = Sequence[Tensor]
Optional = Sequence[Tensor | None]
MEAN, SUM = 1, 2


def vocab_cross_entropy(
    comm: Communicator,
    logits: Tensors,
    target: Tensors,
    weight: Optional,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    classes: int,
) -> list[Tensor]:
    """Cross-entropy of logits whose classes are split: only statistics of a row travel.

    With q the weight of each of C classes in a row's loss and m the row's maximum, it is
    (Σ q)·log Σ exp(z − m) − Σ q·(z − m). For a target t, smoothed by ε, q is (1 − ε)·w[t] at t, and
    ε/C·w on top everywhere; for probabilities p it is w·((1 − ε)·p + ε/C). So torch defines it.
    """
    at = 1 if logits[0].dim() > 1 else 0
    with torch.no_grad():
        peak = comm.all_reduce([greatest(z.detach(), [at]) for z in logits], "max")
    shifted = [wide(z - m) for z, m in zip(logits, peak, strict=True)]
    soft, even = target[0].is_floating_point(), label_smoothing / classes
    parts = []
    for z, t, w, rank in zip(shifted, target, weight, comm.ranks, strict=True):
        w = None if w is None else w.reshape(-1, *[1] * (z.dim() - at - 1))
        if soft:
            stats = _probable(z, t, w, at, label_smoothing, even)
        else:
            own = t - chunk(classes, rank, comm.size)[0]
            stats = _picked(z, own, w, at, label_smoothing, even)
        parts.append(torch.stack([z.exp().sum(at), *stats]))
    sums = partial_to_invariant(comm, parts)
    found = []
    for s, t, z in zip(sums, target, logits, strict=True):
        loss = s[0].log() * (s[2] if len(s) > 2 else 1.0) - s[1]
        counts = None if soft else t != ignore_index
        rows = None if len(s) < 4 else s[3]
        found.append(_reduce(loss, counts, rows, reduction).to(z.dtype))
    return found


def _probable(
    z: Tensor, p: Tensor, w: Tensor | None, at: int, smoothing: float, even: float
) -> tuple[Tensor, ...]:
    """Σ q·z and Σ q of a rank's classes, for targets that are probabilities."""
    q = wide(p) * (1 - smoothing) + even
    q = q if w is None else q * w
    return (q * z).sum(at), q.sum(at)


def _picked(
    z: Tensor, own: Tensor, w: Tensor | None, at: int, smoothing: float, even: float
) -> tuple[Tensor, ...]:
    """Σ q·z of a rank's classes, for targets that are classes; with weights Σ q and w[t] too."""
    elsewhere = (own < 0) | (own >= z.shape[at])
    if z.shape[at] == 0:
        nothing = z.sum(at)
        return (nothing,) if w is None else (nothing,) * 3
    place = own.masked_fill(elsewhere, 0)
    picked = z.gather(at, place.unsqueeze(at)).squeeze(at).masked_fill(elsewhere, 0.0)
    if w is None:
        return ((1 - smoothing) * picked + even * z.sum(at) if smoothing else picked,)
    weighs = w.flatten()[place].masked_fill(elsewhere, 0.0)
    products, total = weighs * picked, weighs
    if smoothing:
        products = (1 - smoothing) * products + even * (w * z).sum(at)
        total = (1 - smoothing) * weighs + even * w.sum()
    return products, total, weighs


def _reduce(loss: Tensor, counts: Tensor | None, weights: Tensor | None, reduction: int) -> Tensor:
    """Reduce the loss of each row; those that do not count are zero, and a mean is weighted."""
    if counts is not None:
        loss = loss.masked_fill(~counts, 0.0)
    if reduction != MEAN:
        return loss.sum() if reduction == SUM else loss
    if counts is None:
        return loss.sum() / loss.numel()
    return loss.sum() / (
        counts.sum() if weights is None else weights.masked_fill(~counts, 0.0).sum()
    )


def mean_cross_entropy(
    comm: Communicator,
    logits: Tensors,
    target: Tensors,
    weight: Optional,
    ignore_index: int,
    label_smoothing: float,
) -> list[Tensor]:
    """The mean over rows that are split: each rank's sum over the count, or weights, of all; shares."""
    counts = _counts(comm, target, weight, ignore_index)
    return [
        F.cross_entropy(z, t, w, None, ignore_index, None, "sum", label_smoothing) / count
        for z, t, w, count in zip(logits, target, weight, counts, strict=True)
    ]


def mean_nll(
    comm: Communicator, logits: Tensors, target: Tensors, weight: Optional, ignore_index: int
) -> list[Tensor]:
    """As `mean_cross_entropy`, of logarithms of probabilities."""
    counts = _counts(comm, target, weight, ignore_index)
    return [
        F.nll_loss(z, t, w, None, ignore_index, None, "sum") / count
        for z, t, w, count in zip(logits, target, weight, counts, strict=True)
    ]


def _counts(
    comm: Communicator, target: Tensors, weight: Optional, ignore_index: int
) -> list[Tensor]:
    own = []
    for t, w in zip(target, weight, strict=True):
        counts = t != ignore_index
        if w is None:
            own.append(counts.sum())
        else:
            own.append(w.detach()[t.masked_fill(~counts, 0)].masked_fill(~counts, 0.0).sum())
    return comm.all_reduce(own)


ALL: dict[str, Callable[..., list[Tensor]]] = {
    f.__name__: f for f in (vocab_cross_entropy, mean_cross_entropy, mean_nll)
}

SCHEMAS = {
    "vocab_cross_entropy": (
        "Tensor logits, Tensor target, Tensor? weight, int reduction, int ignore_index, "
        "float label_smoothing, int classes"
    ),
    "mean_cross_entropy": (
        "Tensor logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing"
    ),
    "mean_nll": "Tensor logits, Tensor target, Tensor? weight, int ignore_index",
}
