"""Conversions and lowerings as operators of torch: `torch.ops.autoshard.*`.

Each takes the name of a process group (or, in the simulator, of a mesh axis, which intercepts it) and
decomposes into collectives and plain operators, so gradients, fake tensors and `torch.compile` follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime import conversions, lowerings
from autoshard.runtime.communicator import Distributed

NAMESPACE = "autoshard"
IMPLEMENTATIONS: dict[str, Callable[..., list[Tensor]]] = {**conversions.ALL, **lowerings.ALL}

_SLICED = "int dim, int blocks, int length"
_SCHEMAS = {
    "invariant_to_replicate": "Tensor x",
    "replicate_to_invariant": "Tensor x",
    "invariant_to_shard": f"Tensor x, {_SLICED}",
    "replicate_to_shard": f"Tensor x, {_SLICED}",
    "shard_to_replicate": f"Tensor x, {_SLICED}",
    "shard_to_invariant": f"Tensor x, {_SLICED}",
    "shard_to_shard": f"Tensor x, {_SLICED}, int to_dim, int to_blocks, int to_length",
    "partial_to_replicate": "Tensor x",
    "partial_to_invariant": "Tensor x",
    "partial_to_shard": f"Tensor x, {_SLICED}",
    **lowerings.SCHEMAS,
}


def _one_rank(name: str) -> Callable[..., Tensor]:
    """The implementation on the one rank of a process group."""
    implementation = IMPLEMENTATIONS[name]
    tensors = sum(part.strip().startswith("Tensor") for part in _SCHEMAS[name].split(","))

    def run(*args: Any) -> Tensor:
        *given, group = args
        lists = [[value] for value in given[:tensors]]
        return implementation(Distributed(group), *lists, *given[tensors:])[0]

    return run


def _define() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, arguments in _SCHEMAS.items():
        library.define(f"{name}({arguments}, str axis) -> Tensor")
        library.impl(name, _one_rank(name), "CompositeImplicitAutograd")
    return library


_LIBRARY = _define()


def operator(name: str) -> Any:
    """The torch operator of a conversion or lowering."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def is_ours(target: object) -> bool:
    """Whether a node's target is one of these operators, whose last argument names an axis."""
    return getattr(target, "namespace", "") == NAMESPACE


__all__ = ["IMPLEMENTATIONS", "is_ours", "operator"]
