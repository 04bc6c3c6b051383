"""What must hold while a model is captured: libraries on their eager branches, no gradient lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from autoshard.compat import serves_an_operator, tree_flatten


class LostBackward(Exception):
    """An `autograd.Function` is applied: its forward would be captured, and its backward dropped."""

    def __init__(self, function: str) -> None:
        super().__init__(function)
        self.function = function


@contextmanager
def capturing(kwargs: dict[str, Any]) -> Iterator[None]:
    """Keep known libraries on their eager branches inside the block.

    Raises:
        LostBackward: inside the block, a custom `autograd.Function` is applied to what needs a gradient.
    """
    with ExitStack() as stack:
        stack.enter_context(_refusing_functions())
        masking = sys.modules.get("transformers.masking_utils")
        if masking is not None:
            for patch in _transformers_masks(masking, kwargs):
                stack.enter_context(patch)
        yield


@contextmanager
def _refusing_functions() -> Iterator[None]:
    """Refuse custom `autograd.Function`s; those that torch itself makes of operators are in order."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        needs = any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in tree_flatten((args, kwargs))[0]
        )
        if needs and torch.is_grad_enabled() and not serves_an_operator(cls):
            raise LostBackward(cls.__qualname__)
        return original.__func__(cls, *args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def _transformers_masks(masking: Any, kwargs: dict[str, Any]) -> list[Any]:
    """While exporting, transformers builds causal masks as tensors where eager says `is_causal`.

    The eager branch is right for the shapes that are captured. Whether sequences are packed is read
    from `position_ids`: those that the model counts itself are never packed.
    """
    patches = []
    if hasattr(masking, "is_torchdynamo_exporting"):
        patches.append(mock.patch.object(masking, "is_torchdynamo_exporting", lambda: False))
    if kwargs.get("position_ids") is None and hasattr(masking, "find_packed_sequence_indices"):
        patches.append(
            mock.patch.object(masking, "find_packed_sequence_indices", lambda position_ids: None)
        )
    return patches
