"""Verification: how far the sharded program is from the unsharded model. Needs no torch to read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Verification:
    """What `autoshard.verify` found. Errors are relative: max |a − b| over max |b| of a tensor.

    Attributes:
        ok: whether every error is within `tolerance`.
        max_output_error: of the worst of the model's outputs.
        max_gradient_error: of the worst of `gradients`; 0 where nothing was trained.
        max_update_error: of the worst parameter after one optimizer step; 0 where nothing was trained.
        gradients: the error of each parameter's gradient, by FQN.
        first_divergence: the first graph node whose value differs, in words; None where none does,
            or none was looked for.
        tolerance: the greatest error that is accepted.
        ranks: how many ranks the sharded program ran on.
    """

    ok: bool
    max_output_error: float
    max_gradient_error: float
    max_update_error: float
    gradients: dict[str, float] = field(default_factory=dict)
    first_divergence: str | None = None
    tolerance: float = 1e-9
    ranks: int = 1

    def report(self, console: Console | None = None) -> None:
        """Print what was compared, how far it is off, and where it goes wrong first."""
        from autoshard.report.verification_report import print_verification

        print_verification(self, console)
