"""The solvers: HiGHS, and CBC where it is missing."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

import pulp

from autoshard.errors import SolverError

SOLVERS = ("HiGHS", "CBC")


def available(solver: str | None = None) -> str:
    """The solver to use.

    Raises:
        SolverError: `solver` is unknown or not installed, or none is.
    """
    if solver is not None and solver not in SOLVERS:
        raise SolverError(
            f"There is no solver '{solver}'.", fix=f"Use one of {', '.join(SOLVERS)}."
        )
    for name in (solver,) if solver else SOLVERS:
        if backend(name, 1.0).available():
            return name
    raise SolverError(
        f"{solver or 'No solver'} is not installed.", fix="Install one: pip install highspy."
    )


class _HiGHS(pulp.HiGHS):
    """HiGHS without the banner that it prints as it is made, before any option can stop it."""

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        with _stdout_closed():
            super().createAndConfigureSolver(lp)


@contextlib.contextmanager
def _stdout_closed() -> Iterator[None]:
    """A block in which what native code writes to standard output is dropped."""
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def backend(name: str, time_limit_s: float, *, relax: bool = False) -> pulp.LpSolver:
    """A solver as PuLP has it, which runs alike each time.

    Args:
        name: "HiGHS" or "CBC".
        time_limit_s: after which it stops.
        relax: whether binaries may be fractions.
    """
    common = {
        "msg": False,
        "timeLimit": time_limit_s,
        "threads": 1,
        "gapRel": 1e-9,
        "mip": not relax,
    }
    if name == "HiGHS":
        return _HiGHS(**common, random_seed=0, solver="simplex" if relax else "choose")
    with warnings.catch_warnings():  # PuLP 3 ships CBC, and says that PuLP 4 will not
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(**common, options=["RandomS 1"])
