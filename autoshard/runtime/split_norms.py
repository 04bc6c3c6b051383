"""Normalisations whose statistics span ranks: sums and sums of squares travel, never what is normalised.

As conversions are, each is written over a communicator and one tensor for each rank carried. `count` is
how many elements of the whole each statistic is of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autoshard.runtime.communicator import Communicator
from autoshard.runtime.conversions import partial_to_replicate
from autoshard.runtime.split_reductions import wide

Tensors = Sequence[Tensor]
Optional = Sequence[Tensor | None]


def _moments(
    comm: Communicator, xs: list[Tensor], dims: list[int], count: int
) -> tuple[list[Tensor], list[Tensor]]:
    """What is left of each element without the mean, and the (biased) variance."""
    means = partial_to_replicate(comm, [x.sum(dims, keepdim=True) / count for x in xs])
    centred = [x - m for x, m in zip(xs, means, strict=True)]
    squares = [c.square().sum(dims, keepdim=True) / count for c in centred]
    return centred, partial_to_replicate(comm, squares)


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def split_layer_norm(
    comm: Communicator,
    xs: Tensors,
    weights: Optional,
    biases: Optional,
    dims: int,
    eps: float,
    count: int,
) -> list[Tensor]:
    """`layer_norm` over the last `dims` dimensions."""
    over = list(range(-dims, 0))
    centred, variances = _moments(comm, [wide(x) for x in xs], over, count)
    return [
        _scaled(c * (v + eps).rsqrt(), w, b).to(x.dtype)
        for c, v, w, b, x in zip(centred, variances, weights, biases, xs, strict=True)
    ]


def split_rms_norm(
    comm: Communicator, xs: Tensors, weights: Optional, dims: int, eps: float | None, count: int
) -> list[Tensor]:
    """`rms_norm` over the last `dims` dimensions."""
    inputs, over = [wide(x) for x in xs], list(range(-dims, 0))
    squares = [x.square().sum(over, keepdim=True) / count for x in inputs]
    means = partial_to_replicate(comm, squares)
    least = torch.finfo(xs[0].dtype).eps if eps is None else eps
    return [
        _scaled(z * (m + least).rsqrt(), w, None).to(x.dtype)
        for z, m, w, x in zip(inputs, means, weights, xs, strict=True)
    ]


def split_group_norm(
    comm: Communicator,
    xs: Tensors,
    weights: Optional,
    biases: Optional,
    groups: int,
    eps: float,
    count: int,
) -> list[Tensor]:
    """`group_norm`, every rank with channels, or places, of all the groups."""
    grouped = [wide(x).unflatten(1, (groups, x.shape[1] // groups)) for x in xs]
    over = list(range(2, grouped[0].dim()))
    centred, variances = _moments(comm, grouped, over, count)
    return [
        _scaled((c * (v + eps).rsqrt()).flatten(1, 2), _channels(w, x), _channels(b, x)).to(x.dtype)
        for c, v, w, b, x in zip(centred, variances, weights, biases, xs, strict=True)
    ]


def split_batch_norm(
    comm: Communicator,
    xs: Tensors,
    weights: Optional,
    biases: Optional,
    running_means: Optional,
    running_vars: Optional,
    momentum: float,
    eps: float,
    count: int,
) -> list[Tensor]:
    """`batch_norm` while training: statistics of the whole batch, running ones too."""
    inputs = [wide(x) for x in xs]
    over = [d for d in range(xs[0].dim()) if d != 1]
    means = partial_to_replicate(comm, [x.sum(over, keepdim=True) / count for x in inputs])
    centred = [x - m for x, m in zip(inputs, means, strict=True)]
    squares = [c.square().sum(over, keepdim=True) / count for c in centred]
    variances = partial_to_replicate(comm, squares)
    unbiased = count / (count - 1)
    for kept, now, scale in ((running_means, means, 1.0), (running_vars, variances, unbiased)):
        for running, statistic in zip(kept, now, strict=True):
            if running is not None:
                _update(running, statistic.detach().flatten() * scale, momentum)
    return [
        _scaled(c * (v + eps).rsqrt(), _channels(w, x), _channels(b, x)).to(x.dtype)
        for c, v, w, b, x in zip(centred, variances, weights, biases, xs, strict=True)
    ]


def split_weight_norm(comm: Communicator, xs: Tensors, scales: Tensors, dim: int) -> list[Tensor]:
    """`_weight_norm`: what lies at each place of `dim` is scaled to a norm."""
    over = [d for d in range(xs[0].dim()) if d != dim]
    squares = [wide(x).square().sum(over, keepdim=True) for x in xs]
    sums = partial_to_replicate(comm, squares)
    return [(x * (g / s.sqrt())).to(x.dtype) for x, g, s in zip(xs, scales, sums, strict=True)]


def _update(running: Tensor, statistic: Tensor, momentum: float) -> None:
    with torch.no_grad():
        running.mul_(1 - momentum).add_(statistic.to(running.dtype), alpha=momentum)


def _channels(weight: Tensor | None, x: Tensor) -> Tensor | None:
    return None if weight is None else weight.reshape(-1, *[1] * (x.dim() - 2))


ALL: dict[str, Callable[..., list[Tensor]]] = {
    f.__name__: f
    for f in (
        split_layer_norm,
        split_rms_norm,
        split_group_norm,
        split_batch_norm,
        split_weight_norm,
    )
}

SCHEMAS = {
    "split_layer_norm": "Tensor x, Tensor? weight, Tensor? bias, int dims, float eps, int count",
    "split_rms_norm": "Tensor x, Tensor? weight, int dims, float? eps, int count",
    "split_group_norm": "Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, int count",
    "split_weight_norm": "Tensor x, Tensor scale, int dim",
    "split_batch_norm": (
        "Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
        "Tensor(b!)? running_var, float momentum, float eps, int count"
    ),
}
