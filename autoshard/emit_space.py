"""How operators over space that is split are emitted: with the whole lengths, and padding taken apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from autoshard.emit import Site


def _each(value: Any, count: int, default: int) -> list[int]:
    """A number for each dimension of space, of an argument that may be one for all."""
    given = [value] if isinstance(value, int) else list(value or [default])
    return given * count if len(given) == 1 else given


def _split(site: Site, count: int) -> tuple[int, int]:
    """Which dimension of space is split, and its length in the whole operand."""
    pairs = zip(site.wholes[0][-count:], site.operands[0][-count:], strict=True)
    axis = next(i for i, (whole, own) in enumerate(pairs) if whole != own)
    return axis, site.wholes[0][axis - count]


def _halo_convolution(site: Site) -> Node:
    kernel = site.wholes[1][2:]
    count, padding = len(kernel), site.arg(4, "padding", 0)
    stride, dilation = (
        _each(site.arg(i, k, 1), count, 1) for i, k in ((3, "stride"), (5, "dilation"))
    )
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    if isinstance(padding, str):
        total = reach if padding == "same" else [0] * count
        before = [t // 2 for t in total]
        after = [t - b for t, b in zip(total, before, strict=True)]
    else:
        before = after = _each(padding, count, 0)
    axis, length = _split(site, count)
    made = _made(length, stride[axis], before[axis] + after[axis], reach[axis])
    bias, groups = site.arg(2, "bias", None), site.arg(6, "groups", 1)
    given = (*site.args[:2], bias, stride, before, after, dilation, groups)
    return site.ours("halo_convolution", *given, axis, length, made)


def _made(length: int, stride: int, padding: int, reach: int) -> int:
    return (length + padding - reach - 1) // stride + 1


def _halo_transposed(site: Site) -> Node:
    kernel = site.wholes[1][2:]
    count = len(kernel)
    stride, padding, more = (
        _each(site.arg(i, k, d), count, d)
        for i, k, d in ((3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0))
    )
    dilation = _each(site.arg(7, "dilation", 1), count, 1)
    axis, length = _split(site, count)
    reach = (kernel[axis] - 1) * dilation[axis]
    made = (length - 1) * stride[axis] - 2 * padding[axis] + reach + more[axis] + 1
    bias, groups = site.arg(2, "bias", None), site.arg(6, "groups", 1)
    given = (*site.args[:2], bias, stride, padding, more, dilation, groups)
    return site.ours("halo_transposed", *given, axis, length, made)


def _halo_pool(site: Site) -> Node:
    name = str(site.target)
    most = "max" in name
    count = int(name[name.index("pool") + 4])
    kernel = _each(site.args[1], count, 1)
    stride = _each(site.arg(2, "stride", None) or kernel, count, 1)
    padding = _each(site.arg(3, "padding", 0), count, 0)
    dilation = _each(site.arg(4, "dilation", 1) if most else 1, count, 1)
    ceiling = bool(site.arg(5 if most else 4, "ceil_mode", False))
    counted = most or bool(site.arg(5, "count_include_pad", True))
    divisor = None if most else site.arg(6, "divisor_override", None)
    axis, length = _split(site, count)
    reach = (kernel[axis] - 1) * dilation[axis]
    made = _made(length, stride[axis], 2 * padding[axis], reach)
    given = ("max" if most else "avg", kernel, stride, padding, dilation, ceiling, counted, divisor)
    return site.ours("halo_pool", site.args[0], *given, axis, length, made)


EMITTERS: dict[str, Callable[[Site], Node]] = {
    "halo_convolution": _halo_convolution,
    "halo_transposed": _halo_transposed,
    "halo_pool": _halo_pool,
}
