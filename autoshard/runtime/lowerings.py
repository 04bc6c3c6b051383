"""Programs of their own for strategies that are more than the operator on slices.

As conversions are, each is written over a communicator and one tensor for each rank carried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from autoshard.runtime import exchanges, halo, split_losses, split_norms, split_reductions
from autoshard.runtime.communicator import Communicator
from autoshard.runtime.exchanges import grouped_products
from autoshard.runtime.slicing import chunk

Tensors = Sequence[Tensor]


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
        product = grouped_products(own, weight, stops[first : first + experts] - start)
        found.append(product.index_select(0, (rows - start) % x.shape[0]))
    return found


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


def causal_queries(
    comm: Communicator,
    q: Tensors,
    k: Tensors,
    v: Tensors,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
    queries: int,
) -> list[Tensor]:
    """Causal attention of `queries` that are split: a rank's have positions of their own."""
    seed = _seed() if dropout_p else 0
    found = []
    for a, b, c, rank in zip(q, k, v, comm.ranks, strict=True):
        places = torch.arange(a.shape[-2], device=a.device) + chunk(queries, rank, comm.size)[0]
        mask = places.unsqueeze(-1) >= torch.arange(b.shape[-2], device=a.device)
        with _seeded(a, seed + rank) if dropout_p else contextlib.nullcontext():
            found.append(
                F.scaled_dot_product_attention(
                    a, b, c, mask, dropout_p, scale=scale, enable_gqa=enable_gqa
                )
            )
    return found


def grouped_queries(
    comm: Communicator,
    q: Tensors,
    k: Tensors,
    v: Tensors,
    mask: Sequence[Tensor | None],
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    heads: int,
) -> list[Tensor]:
    """Attention of query `heads` that are split, over whole key/value heads: each rank takes its own's."""
    seed = _seed() if dropout_p else 0
    found = []
    for a, b, c, m, rank in zip(q, k, v, mask, comm.ranks, strict=True):
        keys, values = (_of_queries(x, heads, chunk(heads, rank, comm.size)) for x in (b, c))
        with _seeded(a, seed + rank) if dropout_p else contextlib.nullcontext():
            found.append(
                F.scaled_dot_product_attention(
                    a, keys, values, m, dropout_p, is_causal, scale=scale, enable_gqa=True
                )
            )
    return found


def _of_queries(x: Tensor, heads: int, cut: tuple[int, int]) -> Tensor:
    """The key/value heads of a slice of the query heads: one for each, or for each equal group of them."""
    (first, count), each = cut, heads // x.shape[-3]
    start, last = first // each, (first + max(count, 1) - 1) // each
    if start == last or first % each == count % each == 0:
        return x.narrow(-3, start, last + 1 - start)
    return x.index_select(-3, torch.arange(first, first + count, device=x.device) // each)


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
        share_of_mean,
        cut_reshape,
        cut_expand,
        split_dropout,
        split_attention,
        causal_queries,
        grouped_queries,
    )
} | {**exchanges.ALL, **halo.ALL, **split_losses.ALL, **split_norms.ALL, **split_reductions.ALL}

SCHEMAS = {
    "expert_products": "Tensor x, Tensor weight, Tensor ends",
    "vocab_embedding": "Tensor weight, Tensor ids, int padding_idx, int length",
    "share_of_mean": "Tensor mean, Tensor x, int dim, int length",
    "cut_reshape": "Tensor x, int[] shape, int dim, int length",
    "cut_expand": "Tensor x, int[] shape, int dim, int length",
    "split_dropout": "Tensor x, float p",
    "split_attention": (
        "Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout_p, bool is_causal, float? scale, "
        "bool enable_gqa"
    ),
    "grouped_queries": (
        "Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout_p, bool is_causal, float? scale, "
        "int heads"
    ),
    "causal_queries": (
        "Tensor q, Tensor k, Tensor v, float dropout_p, float? scale, bool enable_gqa, int queries"
    ),
    **exchanges.SCHEMAS,
    **halo.SCHEMAS,
    **split_losses.SCHEMAS,
    **split_norms.SCHEMAS,
    **split_reductions.SCHEMAS,
}
"""The arguments of each as an operator; its result is one tensor."""
