"""The four collectives as functional operators of torch, with fake kernels and no gradients.

They never write to their operands. Gradients belong to the conversions, which call these.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.compat import process_group
from autoshard.runtime.slicing import join, take


@torch.library.custom_op("autoshard::all_reduce", mutates_args=())
def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The sum or maximum of x over the ranks of a group."""
    total = x.clone(memory_format=torch.contiguous_format)
    how = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    dist.all_reduce(total, how, process_group(group))
    return total


@all_reduce.register_fake
def _(x: Tensor, op: str, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("autoshard::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
    """The whole whose slices of `dim` the ranks of a group hold."""
    x = x.contiguous()
    out = x.new_empty((size * x.shape[0], *x.shape[1:]) if x.dim() else (size,))
    dist.all_gather_single(out, x, process_group(group))
    if dim == 0 and blocks == 1:
        return out
    return join(out.chunk(size), dim, blocks).contiguous()


@all_gather.register_fake
def _(x: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= size
    return x.new_empty(shape)


@torch.library.custom_op("autoshard::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
    """This rank's slice of `dim` of the sum over the ranks of a group."""
    parts = [take(x, dim, blocks, r, size) for r in range(size)]
    given = x.contiguous() if dim == 0 and blocks == 1 else torch.cat([p.contiguous() for p in parts])
    out = x.new_empty(parts[0].shape)
    dist.reduce_scatter_single(out, given, group=process_group(group))
    return out


@reduce_scatter.register_fake
def _(x: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= size
    return x.new_empty(shape)


@torch.library.custom_op("autoshard::all_to_all", mutates_args=())
def all_to_all(
    x: Tensor,
    have_dim: int,
    have_blocks: int,
    want_dim: int,
    want_blocks: int,
    size: int,
    group: str,
) -> Tensor:
    """This rank's slice by `want` of the whole of which x is its slice by `have`."""
    given = torch.stack([take(x, want_dim, want_blocks, r, size) for r in range(size)])
    out = torch.empty_like(given)
    dist.all_to_all_single(out, given, group=process_group(group))
    return join(out.unbind(), have_dim, have_blocks).contiguous()


@all_to_all.register_fake
def _(
    x: Tensor,
    have_dim: int,
    have_blocks: int,
    want_dim: int,
    want_blocks: int,
    size: int,
    group: str,
) -> Tensor:
    shape = list(x.shape)
    shape[have_dim] *= size
    shape[want_dim] //= size
    return x.new_empty(shape)
