"""What programs of their own take beside the operators that they stand for.

Counted on float32 tensors in the simulator, with `runtime.live_memory`; benchmarks/memory.py holds whole
plans to measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Extra(NamedTuple):
    """In tensors as large as the operator's largest, on a rank: kept, and at most at once in each phase."""

    kept: float = 0
    forward: float = 0
    backward: float = 0


_NORM = Extra(1, 1, 1)  # centred and scaled, where torch's kernel keeps its operand alone

LOWERED: Mapping[str, Extra] = {
    "split_layer_norm": _NORM,
    "split_group_norm": _NORM,
    "split_batch_norm": _NORM,
    "split_weight_norm": _NORM,
    "split_rms_norm": Extra(1, 0, 1),
    "split_softmax": Extra(1, 1, 1),
    "split_logsumexp": Extra(1, 1, 0),
    "split_variance": Extra(0, 1, 1),
    "split_vector_norm": Extra(1, 1, 1),
    "split_extreme": Extra(1, 2, 0),
    "split_cumsum": Extra(0, 1, 1),
    "vocab_cross_entropy": Extra(1, 0, 0),
}
"""By the lowering's name; the others take what their operators take."""
