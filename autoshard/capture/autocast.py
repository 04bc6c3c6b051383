"""What `torch.autocast` casts before it runs an operator: found by running it on tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autoshard.compat import (
    TO_COPY,
    TorchDispatchMode,
)

aten = torch.ops.aten

_BY_PRODUCTS = frozenset({aten.einsum.default, aten.tensordot.default, aten.inner.default,
                          aten.bilinear.default, aten.chain_matmul.default})  # fmt: skip
"""Operators made of products: autocast casts inside them, which is as good as casting before them."""


def casts(node: Node, device: str, dtype: torch.dtype) -> dict[Node, torch.dtype] | None:
    """For each operand that autocast casts, to what; None where that cannot be told.

    Args:
        node: a call whose operands and results carry their traced values.
        device, dtype: of the autocast block.
    """
    sources = [n for n in node.all_input_nodes if _is_float(n.meta.get("val"))]
    wanted = _dtypes(node.meta.get("val"))
    if not sources:
        return {}
    seen = _observed(node, sources, device, dtype)
    # Operators made of others may cast as well: attention computes in float32, after autocast.
    tries = [{n: to for n, to in seen.items() if to == kind} for kind in (dtype, torch.float32)]
    if node.target in _BY_PRODUCTS:
        tries.append({n: dtype for n in sources if n.meta["val"].dtype != dtype})
    return next((t for t in [*filter(None, tries), {}] if _run(node, t) == wanted), None)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _dtypes(value: Any) -> list[torch.dtype]:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [v.dtype for v in values if isinstance(v, Tensor)]


class _Watch(TorchDispatchMode):
    """Notes the casts of given tensors, up to the first operator that is no cast."""

    def __init__(self, watched: dict[int, Node]) -> None:
        super().__init__()
        self._watched = watched
        self._over = False
        self.found: dict[Node, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        source = self._watched.get(id(args[0])) if args else None
        if func is TO_COPY and source is not None and not self._over:
            self.found.setdefault(source, given["dtype"])
        elif func is not aten.detach.default and func.namespace != "prim":  # asks for a device
            self._over = True
        return func(*args, **given)


def _observed(
    node: Node, sources: list[Node], device: str, dtype: torch.dtype
) -> dict[Node, torch.dtype]:
    """The casts with which the operator begins, as it runs under autocast."""
    values = {n: _fresh(n.meta["val"]) for n in sources}
    watch = _Watch({id(value): n for n, value in values.items()})
    with torch.no_grad(), torch.autocast(device, dtype, cache_enabled=False), watch:
        _call(node, values)
    return watch.found


def _run(node: Node, cast: dict[Node, torch.dtype]) -> list[torch.dtype]:
    """The dtypes of the results where these operands are cast, without autocast."""
    sources = [n for n in node.all_input_nodes if _is_float(n.meta.get("val"))]
    values = {n: _fresh(n.meta["val"], cast.get(n)) for n in sources}
    try:
        with torch.no_grad():
            return _dtypes(_call(node, values))
    except RuntimeError:
        return []


def _fresh(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(value, dtype=dtype or value.dtype)


def _call(node: Node, values: dict[Node, Tensor]) -> Any:
    def value(n: Node) -> Any:
        return values.get(n, n.meta.get("val"))

    target: Any = node.target
    args = torch.fx.map_arg(node.args, value)
    return target(*args, **torch.fx.map_arg(node.kwargs, value))
