"""Move an optimizer from the original model's parameters to the sharded module's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import OptionsError
from autoshard.runtime.backend import Backend


def rebind(optimizer: torch.optim.Optimizer, pairs: Mapping[int, Tensor], backend: Backend) -> None:
    """Replace the parameters of `optimizer`, and split its state as they are split.

    Args:
        optimizer: built on the original model's parameters.
        pairs: the sharded parameter for the `id` of each original one.
        backend: says how a whole tensor is split.

    Raises:
        OptionsError: it holds a parameter that is not among `pairs`; nothing is changed then.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(id(p) not in pairs for p in held)
    if strangers:
        raise OptionsError(
            f"The optimizer holds {strangers} parameter(s) that the original model does not have, of {len(held)}.",
            fix="Build it from the sharded module's parameters().",
        )
    for group in optimizer.param_groups:
        group["params"] = list(
            {id(new): new for new in (pairs[id(p)] for p in group["params"])}.values()
        )
    state = {
        pairs[id(p)]: _split(optimizer.state[p], p, pairs[id(p)], backend)
        for p in held
        if p in optimizer.state
    }
    optimizer.state.clear()
    optimizer.state.update(state)


def _split(state: dict[str, Any], old: Tensor, new: Tensor, backend: Backend) -> dict[str, Any]:
    """The state of one parameter: tensors of its shape are split as it is."""
    return {
        key: backend.fit(value, new.detach())
        if isinstance(value, Tensor) and value.shape == old.shape
        else value
        for key, value in state.items()
    }
