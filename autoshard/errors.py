"""The errors a user of autoshard can meet.

Every error says three things: *what* is wrong, *where* (a parameter's FQN, an operator, the user's
source line), and how to *fix* it. Errors about input are `ValueError`s too, errors about the
environment are `RuntimeError`s, so that code which knows nothing of autoshard can still catch them.
"""

from __future__ import annotations


class AutoshardError(Exception):
    """Base of every error raised on purpose.

    Args:
        what: one sentence that says what is wrong.
        where: the parameter, operator, file or source line at fault; may be empty.
        fix: what the user can do about it; may be empty.
    """

    def __init__(self, what: str, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what, where, fix)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


class OptionsError(AutoshardError, ValueError):
    """An argument has a value that is not understood."""


class CaptureError(AutoshardError, ValueError):
    """The model cannot be captured as a graph."""


class RuleError(AutoshardError, ValueError):
    """A rule is malformed, or does not fit the operator it is for."""


class MeshError(AutoshardError, ValueError):
    """The mesh is malformed, or does not fit the plan or the process group."""


class ConstraintError(AutoshardError, ValueError):
    """A constraint matches no parameter, or asks for a split that is not sound."""


class InfeasibleError(AutoshardError, ValueError):
    """No plan fits the memory budget.

    Attributes:
        least_budget_bytes: the least budget a rank that some plan fits, or None where it is not known.
    """

    def __init__(
        self, what: str, where: str = "", fix: str = "", *, least_budget_bytes: int | None = None
    ) -> None:
        super().__init__(what, where, fix)
        self.least_budget_bytes = least_budget_bytes


class SolverError(AutoshardError, RuntimeError):
    """The solver is missing, failed, or found nothing in its time."""


class CalibrationError(AutoshardError, RuntimeError):
    """A measurement of the hardware failed, or could not be made."""


class PlanError(AutoshardError, ValueError):
    """A plan's file is damaged, of an unknown version, or made for another model or mesh."""


class VerifyError(AutoshardError, RuntimeError):
    """Ranks disagree on a value that must be the same on all of them."""
