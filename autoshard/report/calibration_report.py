"""A calibration as a page: what was measured, what the profile says of it, and how far that is off."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from autoshard.cost.calibration import Calibration, Fit
from autoshard.report import format as fmt
from autoshard.report.hardware_report import print_profile
from autoshard.report.layout import Column, Row, show, table, width_of

POOR = 0.3
"""A residual beyond this is marked."""


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr; gives a function of what is measured next, how many are done, and of how many."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def say(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield say


def print_calibration(found: Calibration, console: Console | None = None) -> None:
    """Print the profile, then every measurement beside what the profile says it takes."""
    console = console or Console()
    width = width_of(console)
    print_profile(found.hardware, console)
    show(console, "", Group(_title(found.fits), Text(), _table(found.fits, width)))
    for sentence in found.assumed:
        show(console, Text(f"• {sentence}", style="yellow"))


def _title(fits: Sequence[Fit]) -> Text:
    sizes = [abs(fit.residual) for fit in fits]
    return Text.assemble(
        ("Measurements", "bold underline"),
        f"  {len(fits)}, and what the profile says of them: ",
        f"{100 * statistics.median(sizes):.0f}% off in the middle, {100 * max(sizes):.0f}% at most",
    )


def _table(fits: Sequence[Fit], width: int) -> Table:
    columns = [
        Column("fitted with"),
        Column("measured", flexible=True),
        Column("takes", number=True),
        Column("predicted", number=True),
        Column("off by", number=True),
    ]
    rows: list[Row] = []
    last = ""
    for fit in fits:
        group = fit.measured.group
        off = f"{100 * fit.residual:+.0f}%".replace("-", "−")
        rows.append(
            [
                Text(group if group != last else "", style="bold"),
                fit.measured.label,
                fmt.seconds(fit.measured.seconds),
                fmt.seconds(fit.predicted_s),
                Text(off, style="yellow" if abs(fit.residual) > POOR else ""),
            ]
        )
        last = group
    return table(width, columns, rows)
