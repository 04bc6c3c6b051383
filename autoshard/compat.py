"""Everything that autoshard uses of torch beyond its public names, in one place.

`TORCH_INTERNALS` lists it; a test checks that each still exists.
"""

from __future__ import annotations

import logging
import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.export import _trace as export_trace
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

TORCH_INTERNALS = (
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.distributed.tensor.placement_types._StridedShard",
    "torch._library",
    "torch.export._trace",
    "torch.utils._pytree",
    "torch._C._distributed_c10d._resolve_process_group",
    "torch.ops._c10d_functional.wait_tensor",
)

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TreeSpec",
    "functional_collectives",
    "functional_twin",
    "in_place_arguments",
    "is_view",
    "local_tensor",
    "process_group",
    "quiet_export",
    "serves_an_operator",
    "sharded_like",
    "spec_of",
    "strided_shard",
    "tree_flatten",
    "tree_flatten_with_names",
    "tree_map",
    "tree_unflatten",
]


def in_place_arguments(target: object) -> tuple[int, ...]:
    """Positions of the arguments that an operator writes to, by its schema."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return ()
    return tuple(
        index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def is_view(target: object) -> bool:
    """Whether an operator's result may share memory with its first argument."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    aliased = [r.alias_info for r in schema.returns if r.alias_info is not None]
    first = schema.arguments[0].alias_info if schema.arguments else None
    return bool(aliased) and first is not None


def functional_twin(target: Any) -> Any | None:
    """The operator that computes what an in-place one writes: `aten.add.Tensor` of `aten.add_.Tensor`."""
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.rstrip("_"), None)
    if packet is None or name.startswith("__") or not name.endswith("_"):
        return None
    overload = target._overloadname
    twin = getattr(packet, overload, None) if overload in packet.overloads() else None
    if twin is None:
        return None
    ours, theirs = twin._schema.arguments, target._schema.arguments
    return twin if [a.name for a in ours] == [a.name for a in theirs] else None


def tree_flatten_with_names(args: Any, kwargs: Any) -> dict[str, Any]:
    """The flattened inputs of a call by name: `args[0]`, `input_ids`, `batch['mask']`."""
    leaves = tree_flatten_with_path(args)[0]
    named = {f"args{keystr(path)}": value for path, value in leaves}
    for name, value in kwargs.items():
        named |= {f"{name}{keystr(path)}": leaf for path, leaf in tree_flatten_with_path(value)[0]}
    return named


def functional_collectives() -> Any:
    """torch's collectives as operators on plain tensors, which give their results to `wait_tensor`."""
    return torch.ops._c10d_functional


def process_group(name: str) -> Any:
    """The process group that torch knows by `name`."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def local_tensor(x: Any) -> torch.Tensor:
    """The local tensor of a DTensor itself: no copy, no autograd."""
    return x._local_tensor


def spec_of(x: Any) -> Any:
    """How a DTensor is placed: mesh, placements, whole shape, strides and dtype."""
    return x._spec


def sharded_like(spec: Any, local: torch.Tensor) -> Any:
    """The DTensor of a DTensor's `_spec` that holds `local`: a tenth of the time of `from_local`."""
    return DTensor(local, copy.copy(spec), requires_grad=False)  # type: ignore[call-arg]


def strided_shard(dim: int, blocks: int) -> Any:
    """DTensor's placement for a dimension cut in blocks, each split over the ranks."""
    return _StridedShard(dim, split_factor=blocks)


def serves_an_operator(function: type) -> bool:
    """Whether an `autograd.Function` is one that torch makes for an operator of `torch.library`."""
    return function.__module__.startswith("torch._library.")


@contextmanager
def quiet_export() -> Iterator[None]:
    """Keep from the user what torch warns of and prints while exporting: errors say it in our words."""
    noisy = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = noisy.level
    unprinted = mock.patch.object(export_trace, "print", create=True)
    with warnings.catch_warnings(), unprinted:
        warnings.simplefilter("ignore")
        noisy.setLevel(logging.ERROR)
        try:
            yield
        finally:
            noisy.setLevel(level)
