"""How operators are emitted: on a rank's sizes, and products together with their biases."""

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
        made: the results' whole shapes.
        axes: names of the mesh axes on which some operand or result is split.
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
    made: tuple[Shape, ...] = ()

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


def _nearest(site: Site) -> None:
    """A size that was asked for becomes the rank's."""
    size = site.arg(1, "output_size", None)
    if size is not None:
        scales = site.arg(2, "scale_factors", None)
        site.args, site.kwargs = [site.args[0], list(site.results[0][-len(size) :]), scales], {}


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
    aten.upsample_nearest1d.vec: _nearest,
    aten.upsample_nearest2d.vec: _nearest,
    aten.upsample_nearest3d.vec: _nearest,
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
