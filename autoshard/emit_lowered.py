"""How lowerings are emitted: as calls of our operators, with what they need to know of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node

from autoshard import emit_space
from autoshard.emit import Site

aten = torch.ops.aten


def _plain(site: Site) -> Node:
    return site.graph.call_function(site.target, tuple(site.args), site.kwargs)


def _mean(site: Site) -> Node:
    """The mean of this rank's part, divided so that the ranks' results are shares of the whole mean."""
    cut = site.taken[0] if site.taken else None
    if cut is not None:
        return site.ours("share_of_mean", _plain(site), site.args[0], *cut)
    return site.graph.call_function(aten.div.Tensor, (_plain(site), site.ranks))


def _vocab_embedding(site: Site) -> Node:
    return site.ours(
        "vocab_embedding",
        site.args[0],
        site.args[1],
        site.arg(2, "padding_idx", -1),
        site.wholes[0][0],
    )


def _expert_products(site: Site) -> Node:
    return site.ours("expert_products", *site.args[:3])


def _vocab_cross_entropy(site: Site) -> Node:
    return site.ours(
        "vocab_cross_entropy",
        *site.args[:2],
        site.arg(2, "weight", None),
        site.arg(3, "reduction", 1),
        site.arg(4, "ignore_index", -100),
        float(site.arg(5, "label_smoothing", 0.0)),
        site.wholes[0][1 if len(site.wholes[0]) > 1 else 0],
    )


def _mean_cross_entropy(site: Site) -> Node:
    return site.ours(
        "mean_cross_entropy",
        *site.args[:2],
        site.arg(2, "weight", None),
        site.arg(4, "ignore_index", -100),
        float(site.arg(5, "label_smoothing", 0.0)),
    )


def _mean_nll(site: Site) -> Node:
    weight, ignored = site.arg(2, "weight", None), site.arg(4, "ignore_index", -100)
    return site.ours("mean_nll", *site.args[:2], weight, ignored)


def _split_dropout(site: Site) -> Node:
    if site.target is not aten.scaled_dot_product_attention.default:
        return site.ours("split_dropout", site.args[0], float(site.arg(1, "p", 0.5)))
    return site.ours(
        "split_attention",
        *site.args[:3],
        site.arg(3, "attn_mask", None),
        float(site.arg(4, "dropout_p", 0.0)),
        bool(site.arg(5, "is_causal", False)),
        site.kwargs.get("scale"),
        bool(site.kwargs.get("enable_gqa", False)),
    )


def _causal_queries(site: Site) -> Node:
    return site.ours(
        "causal_queries",
        *site.args[:3],
        float(site.arg(4, "dropout_p", 0.0)),
        site.kwargs.get("scale"),
        bool(site.kwargs.get("enable_gqa", False)),
        site.wholes[0][-2],
    )


def _grouped_queries(site: Site) -> Node:
    return site.ours(
        "grouped_queries",
        *site.args[:3],
        site.arg(3, "attn_mask", None),
        float(site.arg(4, "dropout_p", 0.0)),
        bool(site.arg(5, "is_causal", False)),
        site.kwargs.get("scale"),
        site.wholes[0][-3],
    )


# --- statistics that span ranks -----------------------------------------------------------------


def _dims(site: Site, index: int = 1) -> list[int]:
    """The dimensions that a reduction is over, from 0 up; all where none is named."""
    rank, given = len(site.wholes[0]), site.arg(index, "dim", None)
    given = [given] if isinstance(given, int) else given
    return [d % rank for d in given] if given else list(range(rank))


def _keeps(site: Site) -> bool:
    """Whether a reduction keeps its dimensions, with size 1."""
    return len(site.results[0]) == len(site.wholes[0])


def _split_extreme(site: Site) -> Node:
    least = "min" in str(site.target)
    return site.ours("split_extreme", site.args[0], _dims(site), _keeps(site), least)


def _shared_argmax(site: Site) -> Node:
    (dim,), least = _dims(site), "argmin" in str(site.target)
    return site.ours("shared_argmax", site.args[0], dim, _keeps(site), site.wholes[0][dim], least)


def _split_any(site: Site) -> Node:
    every = ".all" in str(site.target)
    return site.ours("split_any", site.args[0], _dims(site), _keeps(site), every)


def _split_vector_norm(site: Site) -> Node:
    return site.ours("split_vector_norm", site.args[0], _dims(site, 2), _keeps(site))


def _split_logsumexp(site: Site) -> Node:
    return site.ours("split_logsumexp", site.args[0], _dims(site), _keeps(site))


def _split_variance(site: Site) -> Node:
    """Overloads say `correction`, or whether it is one."""
    if "correction" in str(site.target):
        correction = site.kwargs.get("correction")
        correction = 1.0 if correction is None else float(correction)
    else:
        correction = float(site.arg(2, "unbiased", True))
    dims = _dims(site)
    count = math.prod([site.wholes[0][d] for d in dims])
    root = "std" in str(site.target)
    return site.ours("split_variance", site.args[0], dims, _keeps(site), count, correction, root)


def _split_softmax(site: Site) -> Node:
    dtype = site.arg(2, "dtype", None)
    return site.ours(
        "split_softmax",
        site.args[0],
        site.arg(1, "dim", -1) % len(site.wholes[0]),
        "log" in str(site.target),
        dtype if isinstance(dtype, torch.dtype) else None,
    )


def _split_cumsum(site: Site) -> Node:
    return site.ours("split_cumsum", site.args[0], site.args[1] % len(site.wholes[0]))


def _split_lookup(site: Site) -> Node:
    """`index_select`, or an index with one tensor."""
    if site.target is aten.index_select.default:
        dim, places = site.args[1] % len(site.wholes[0]), site.args[2]
    else:
        given = site.args[1]
        dim = next(i for i, item in enumerate(given) if item is not None)
        places = given[dim]
    return site.ours("split_lookup", site.args[0], places, dim, site.wholes[0][dim])


def _exchanged_products(site: Site) -> Node:
    return site.ours("exchanged_products", *site.args[:3], site.wholes[0][0])


def _exchanged_lookup(site: Site) -> Node:
    """A lookup of rows, by one list of places."""
    selects = site.target is aten.index_select.default
    places = site.args[2] if selects else site.args[1][0]
    return site.ours("exchanged_lookup", site.args[0], places, site.wholes[0][0])


def _split_gather(site: Site) -> Node:
    dim = site.args[1] % len(site.wholes[0])
    return site.ours("split_gather", site.args[0], site.args[2], dim, site.wholes[0][dim])


def _split_layer_norm(site: Site) -> Node:
    normalized = site.args[1]
    weight, bias = site.arg(2, "weight", None), site.arg(3, "bias", None)
    eps, count = float(site.arg(4, "eps", 1e-5)), math.prod(normalized)
    return site.ours("split_layer_norm", site.args[0], weight, bias, len(normalized), eps, count)


def _split_rms_norm(site: Site) -> Node:
    normalized, weight = site.args[1], site.arg(2, "weight", None)
    eps, count = site.arg(3, "eps", None), math.prod(normalized)
    return site.ours("split_rms_norm", site.args[0], weight, len(normalized), eps, count)


def _split_group_norm(site: Site) -> Node:
    groups, shape = site.args[1], site.wholes[0]
    weight, bias = site.arg(2, "weight", None), site.arg(3, "bias", None)
    eps, count = float(site.arg(4, "eps", 1e-5)), math.prod(shape[1:]) // groups
    return site.ours("split_group_norm", site.args[0], weight, bias, groups, eps, count)


def _split_batch_norm(site: Site) -> Node:
    given, shape = site.args[:5], site.wholes[0]
    momentum, eps = float(site.args[6]), float(site.args[7])
    return site.ours("split_batch_norm", *given, momentum, eps, math.prod(shape) // shape[1])


def _split_weight_norm(site: Site) -> Node:
    return site.ours("split_weight_norm", *site.args[:2], site.arg(2, "dim", 0))


def _recut(site: Site) -> Node:
    """A view between cuts that do not meet."""
    before = next(d for d, n in enumerate(site.wholes[0]) if n != site.operands[0][d])
    shape = site.made[0]
    dim = next(d for d, n in enumerate(shape) if n != site.results[0][d])
    parts = (site.wholes[0][before], shape[dim])
    rows = math.prod(site.wholes[0][:before])
    return site.ours("recut", site.args[0], rows, *parts, list(shape), dim)


EMITTERS: dict[str, Callable[[Site], Node]] = {
    "": _plain,
    "mean": _mean,
    "vocab_embedding": _vocab_embedding,
    "expert_products": _expert_products,
    "vocab_cross_entropy": _vocab_cross_entropy,
    "mean_cross_entropy": _mean_cross_entropy,
    "mean_nll": _mean_nll,
    "split_dropout": _split_dropout,
    "causal_queries": _causal_queries,
    "grouped_queries": _grouped_queries,
    "split_extreme": _split_extreme,
    "shared_argmax": _shared_argmax,
    "split_any": _split_any,
    "split_vector_norm": _split_vector_norm,
    "split_logsumexp": _split_logsumexp,
    "split_variance": _split_variance,
    "split_softmax": _split_softmax,
    "split_cumsum": _split_cumsum,
    "split_lookup": _split_lookup,
    "split_gather": _split_gather,
    "split_layer_norm": _split_layer_norm,
    "split_rms_norm": _split_rms_norm,
    "split_group_norm": _split_group_norm,
    "split_batch_norm": _split_batch_norm,
    "split_weight_norm": _split_weight_norm,
    "recut": _recut,
    "exchanged_products": _exchanged_products,
    "exchanged_lookup": _exchanged_lookup,
    **emit_space.EMITTERS,
}
