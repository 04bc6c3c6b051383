"""How far tensors are from each other, and a loss that every element of every output weighs in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def relative(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """max |found − wanted| over max |wanted| (or `floor`); infinite where shapes, or infinities, differ."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    a, b = (
        torch.view_as_real(x) if x.is_complex() else x for x in (found.detach(), wanted.detach())
    )
    a, b = a.double(), b.double()
    same = torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    if bool(same.all()):
        return 0.0
    off = (a - b).abs().masked_fill(same, 0.0).nan_to_num(float("inf"), float("inf"))
    scale = float(b.abs().nan_to_num(0.0, 0.0).max())
    return float(off.max()) / max(scale, floor, 1e-300)


def weighted_sum(outputs: Sequence[Tensor]) -> Tensor | None:
    """A sum that weighs every element of every output differently; None where none has a gradient."""
    total = None
    for index, x in enumerate(outputs):
        if x.is_floating_point() and x.requires_grad and x.numel():
            generator = torch.Generator().manual_seed(index)
            weights = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device)
            term = (x.double() * weights).sum() / x.numel() ** 0.5
            total = term if total is None else total + term
    return total
