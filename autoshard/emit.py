"""How operators are emitted: arguments that hold sizes, and lowerings as calls of our operators."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from autoshard.compat import UNSAFE_VIEW
from autoshard.mesh import Mesh
from autoshard.runtime.operators import operator

aten = torch.ops.aten
Shape = tuple[int, ...]


@dataclass
class Site:
    """One operator about to be emitted; `LOCAL_ARGUMENTS` may change its target and arguments.

    Attributes:
        graph: where it goes.
        target, args, kwargs: what is called; tensors are nodes of the new graph.
        results, operands: the shapes that one rank holds.
        wholes: the operands' whole shapes.
        axes: names of the mesh axes on which some operand is split.
        mesh: all axes.
        cuts: for each result, the dimension that is cut unevenly and its length in the whole; None where
            none is.
        taken: the same for each operand.
    """

    graph: Graph
    target: Any
    args: list[Any]
    kwargs: dict[str, Any]
    results: tuple[Shape, ...]
    operands: tuple[Shape, ...]
    wholes: tuple[Shape, ...]
    axes: tuple[str, ...]
    mesh: Mesh
    cuts: tuple[tuple[int, int] | None, ...] = ()
    taken: tuple[tuple[int, int] | None, ...] = ()

    def arg(self, index: int, name: str, default: Any) -> Any:
        """The argument at `index`, or by `name`, or `default`."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    @property
    def ranks(self) -> int:
        """Number of ranks on the axes that are split."""
        count = 1
        for axis in self.mesh.axes:
            count *= axis.size if axis.name in self.axes else 1
        return count

    def ours(self, name: str, *args: Any) -> Node:
        """A call of one of our operators on the (one) axis that is split."""
        return self.graph.call_function(operator(name), (*args, self.axes[0]))


# --- arguments that hold sizes ------------------------------------------------------------------


def _reshape(site: Site) -> None:
    """A converted tensor may not be contiguous: a view becomes a reshape, to the rank's sizes."""
    shape = list(site.results[0])
    site.target, site.args, site.kwargs = aten.reshape.default, [site.args[0], shape], {}
    _to_own("cut_reshape", site)


def _expand(site: Site) -> None:
    site.args[1] = list(site.results[0])
    _to_own("cut_expand", site)


def _to_own(name: str, site: Site) -> None:
    """Where ranks have different sizes, each works out its own."""
    cut = site.cuts[0] if site.cuts else None
    if cut is not None:
        site.target, site.kwargs = operator(name), {}
        site.args = [*site.args[:2], *cut, site.axes[0]]


def _slice(site: Site) -> None:
    """A run of blocks: it starts as many blocks on in what the rank holds."""
    dim = site.arg(1, "dim", 0) % len(site.wholes[0])
    whole, local, length = site.wholes[0][dim], site.operands[0][dim], site.results[0][dim]
    if whole == local:
        return
    start = site.arg(2, "start", 0) or 0
    site.target, site.kwargs = aten.slice.Tensor, {}
    cut = site.cuts[0] if site.cuts else None
    if cut is not None and cut[0] == dim:  # slices of different sizes: all of each
        site.args = [site.args[0], dim, 0, sys.maxsize]
        return
    start = min(max(start + whole if start < 0 else start, 0), whole) * local // whole
    site.args = [site.args[0], dim, start, start + length]


def _split(site: Site) -> None:
    """Parts of the rank's sizes, whatever they were asked by."""
    dim = site.arg(2, "dim", 0)
    sizes = [shape[dim] for shape in site.results]
    if len(sizes) == 1:  # perhaps of different sizes on the ranks
        site.target, asked = aten.split.Tensor, max(sizes[0], 1)
    else:
        site.target, asked = aten.split_with_sizes.default, sizes
    site.args, site.kwargs = [site.args[0], asked, dim], {}


def _groups(site: Site) -> None:
    """Groups of the rank's channels: `[(g o), i]` weights, `[(g i), o]` where transposed."""
    if len(site.args) > 6:
        transposed = "transpose" in str(site.target)
        at = len(site.operands[0]) - len(site.operands[1]) + 1  # 0 where there is no batch
        channels = site.results[0][at] if transposed else site.operands[0][at]
        site.args[6] = channels // site.operands[1][1]


def _group_norm(site: Site) -> None:
    """Whole groups are split: as many a rank as its channels hold."""
    site.args[1] = site.args[1] * site.operands[0][1] // site.wholes[0][1]


LOCAL_ARGUMENTS: dict[Any, Callable[[Site], None]] = {
    aten.view.default: _reshape,
    aten.reshape.default: _reshape,
    UNSAFE_VIEW: _reshape,
    aten.unflatten.int: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.view_as.default: _reshape,
    aten.reshape_as.default: _reshape,
    aten.ravel.default: _reshape,
    aten.expand.default: _expand,
    aten.broadcast_to.default: _expand,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.split.sizes: _split,
    aten.chunk.default: _split,
    aten.unsafe_split.Tensor: _split,
    aten.unsafe_chunk.default: _split,
    aten.tensor_split.sections: _split,
    aten.group_norm.default: _group_norm,
    aten.conv1d.default: _groups,
    aten.conv2d.default: _groups,
    aten.conv3d.default: _groups,
    aten.conv1d.padding: _groups,
    aten.conv2d.padding: _groups,
    aten.conv_transpose1d.default: _groups,
    aten.conv_transpose2d.input: _groups,
    aten.conv_transpose3d.input: _groups,
}


# --- products with a bias -----------------------------------------------------------------------


def _linear_bias(args: tuple[Any, ...], bias: Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.linear.default, (*args[:2], bias)


def _mm_bias(args: tuple[Any, ...], bias: Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.addmm.default, (bias, *args)


BIASED: dict[Any, Callable[[tuple[Any, ...], Node], tuple[Any, tuple[Any, ...]]]] = {
    aten.linear.default: _linear_bias,
    aten.mm.default: _mm_bias,
}
"""For products whose bias capture split off: the operator that does both, and its arguments."""


# --- lowerings ----------------------------------------------------------------------------------


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
    "split_extreme": _split_extreme,
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
}
