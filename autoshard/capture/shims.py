"""Help that some libraries need to be captured as they run in eager."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def capturing(kwargs: dict[str, Any]) -> Iterator[None]:
    """Keep known libraries on their eager branches inside the block."""
    with ExitStack() as stack:
        masking = sys.modules.get("transformers.masking_utils")
        if masking is not None:
            for patch in _transformers_masks(masking, kwargs):
                stack.enter_context(patch)
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
