"""A verification as a page: is the sharded program right, how exactly, and where is it not."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoshard.report import format as fmt
from autoshard.report.layout import Cell, Column, show, table, width_of
from autoshard.verification import Verification

WORST = 10
"""How many gradients beyond the tolerance are listed by name."""


def print_verification(verification: Verification, console: Console | None = None) -> None:
    """Print the verdict, the errors beside the tolerance, the worst gradients and the first node."""
    console = console or Console()
    width = width_of(console)
    show(console, _verdict(verification), "", _errors(verification, width))
    if (divergence := verification.first_divergence) is not None:
        where = Text.assemble(("\nFirst node that differs: ", "bold red"), divergence)
        show(console, where)


def _verdict(v: Verification) -> Text:
    ranks = fmt.plural(v.ranks, "rank")
    if v.ok:
        return Text(f"✓ On {ranks} the sharded model computes what the model does.", "bold green")
    return Text(f"✗ On {ranks} the sharded model does NOT compute what the model does.", "bold red")


def _errors(v: Verification, width: int) -> Table:
    """A row for each comparison, and one for each gradient that is beyond the tolerance."""
    beyond = [(name, error) for name, error in v.gradients.items() if not error <= v.tolerance]
    beyond.sort(key=lambda item: (-item[1] if item[1] == item[1] else -math.inf, item[0]))
    gradients = f"gradients of {fmt.plural(len(v.gradients), 'parameter')}"
    rows = [
        _row(Text("outputs"), v.max_output_error, v.tolerance),
        _row(Text(gradients), v.max_gradient_error, v.tolerance),
        *(_row(Text(f"  {name}"), error, v.tolerance) for name, error in beyond[:WORST]),
        _row(Text("parameters after a step"), v.max_update_error, v.tolerance),
    ]
    if len(beyond) > WORST:
        left = Text(f"  and {fmt.plural(len(beyond) - WORST, 'more gradient')}", style="dim")
        rows.insert(-1, [left, "", "", ""])
    columns = [
        Column("compared", flexible=True),
        Column("greatest error", number=True),
        Column("tolerance", number=True),
        Column(""),
    ]
    return table(width, columns, rows)


def _row(name: Text, error: float, tolerance: float) -> list[Cell]:
    good = error <= tolerance
    style = "green" if good else "bold red"
    mark = Text("✓" if good else "✗", style=style)
    return [name, Text(fmt.error(error), style=style), fmt.error(tolerance), mark]
