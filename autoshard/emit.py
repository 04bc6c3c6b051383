"""How operators are emitted: arguments that hold sizes, and lowerings as calls of our operators."""

from __future__ import annotations

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


def _narrow(site: Site) -> None:
    dim = site.args[1]
    if site.cuts and site.cuts[0] is not None and site.cuts[0][0] == dim % len(site.results[0]):
        site.target, site.args = aten.slice.Tensor, [site.args[0], dim, 0, sys.maxsize]  # all of it
    else:
        site.args[3] = site.results[0][dim]


def _split(site: Site) -> None:
    """Parts of the rank's sizes."""
    dim = site.arg(2, "dim", 0)
    sizes = [shape[dim] for shape in site.results]
    site.args[1] = sizes[0] if site.target is aten.split.Tensor else sizes


def _groups(site: Site) -> None:
    """Groups of the rank's channels: `[(g o), i]` weights, `[(g i), o]` where transposed."""
    if len(site.args) > 6:
        transposed = "transpose" in str(site.target)
        channels = site.results[0][1] if transposed else site.operands[0][1]
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
    aten.expand.default: _expand,
    aten.broadcast_to.default: _expand,
    aten.narrow.default: _narrow,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.split.sizes: _split,
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
        site.args[0],
        site.args[1],
        site.arg(3, "reduction", 1),
        site.arg(4, "ignore_index", -100),
        float(site.arg(5, "label_smoothing", 0.0)),
        site.wholes[0][1 if len(site.wholes[0]) > 1 else 0],
    )


def _mean_cross_entropy(site: Site) -> Node:
    return site.ours(
        "mean_cross_entropy",
        site.args[0],
        site.args[1],
        site.arg(4, "ignore_index", -100),
        float(site.arg(5, "label_smoothing", 0.0)),
    )


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


EMITTERS: dict[str, Callable[[Site], Node]] = {
    "": _plain,
    "mean": _mean,
    "vocab_embedding": _vocab_embedding,
    "expert_products": _expert_products,
    "vocab_cross_entropy": _vocab_cross_entropy,
    "mean_cross_entropy": _mean_cross_entropy,
    "split_dropout": _split_dropout,
}
