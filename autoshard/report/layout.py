"""Tables that fit a console of any width and never cut a number.

rich shortens cells where a table is too wide. Here every column but the flexible ones is as wide as
its content, the flexible ones share what is left, and dotted names are broken at their dots.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

LEAST_WIDTH = 76
"""What the widest row of numbers needs; a narrower console wraps the lines itself."""
_GAP = 2  # between columns: one cell of padding, one for the box's divider
WIDE = 140
"""The console width from which a report has its long columns."""


@dataclass(frozen=True)
class Column:
    """A column: right-justified where `number`, and narrowed where `flexible` and space is short.

    Attributes:
        share: how much of the space that flexible columns divide is this one's.
    """

    header: str
    number: bool = False
    flexible: bool = False
    share: int = 1


Cell = str | Text
Row = Sequence[Cell]


def width_of(console: Console) -> int:
    """The width to lay out for, in cells: the console's, but no less than a report needs."""
    return max(LEAST_WIDTH, console.width)


def show(console: Console, *parts: RenderableType) -> None:
    """Print `parts`, laid out for `width_of(console)`: also where the console is narrower."""
    options = console.options.update(width=width_of(console), highlight=False)
    for part in parts:
        # rich would lay out for the console's own width, and crop.
        console.print(Segments(console.render(part, options)), crop=False, end="")


def table(width: int, columns: Sequence[Column], rows: Sequence[Row], footer: Row = ()) -> Table:
    """A table at most `width` cells wide, of `rows` with a cell for each column.

    Cells are taken as they are (no markup); lines in a cell are kept.
    """
    widths = _widths(width, columns, [*rows, footer] if footer else rows)
    made = Table(
        box=box.SIMPLE, pad_edge=False, show_footer=bool(footer), padding=(0, 1, 0, 0),
        show_edge=False, header_style="bold", footer_style="bold", highlight=False,
    )  # fmt: skip
    for index, (column, cells) in enumerate(zip(columns, widths, strict=True)):
        made.add_column(
            Text(column.header),
            Text.assemble(footer[index]) if footer else "",
            justify="right" if column.number else "left",
            width=cells,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(_fit(cell, cells) for cell, cells in zip(row, widths, strict=True)))
    return made


def _widths(width: int, columns: Sequence[Column], rows: Sequence[Row]) -> list[int]:
    """The width of each column: of its content, less what flexible columns must give up."""
    wanted = [
        max([cell_len(column.header), *(_longest_line(row[index]) for row in rows)])
        for index, column in enumerate(columns)
    ]
    flexible = [index for index, column in enumerate(columns) if column.flexible]
    gaps = _GAP * (len(columns) - 1)
    left = width - gaps - sum(wanted[i] for i in range(len(columns)) if i not in flexible)
    # Narrowest first, so that what one column does not need goes to those that need more.
    flexible.sort(key=lambda index: wanted[index] / columns[index].share)
    shares = sum(columns[index].share for index in flexible)
    for index in flexible:
        fair = max(8, left * columns[index].share // shares)
        wanted[index] = min(wanted[index], fair)
        left -= wanted[index]
        shares -= columns[index].share
    return wanted


def _longest_line(cell: Cell) -> int:
    return max(map(cell_len, str(cell).split("\n")))


def _fit(cell: Cell, width: int) -> Text:
    """`cell` with the words that are wider than `width` broken at their dots or underscores.

    What is broken off an indented line is indented as far.
    """
    text = Text(cell) if isinstance(cell, str) else cell
    lines = []
    for line in text.split("\n", allow_blank=True):
        indent = len(line.plain) - len(line.plain.lstrip())
        first, *rest = line.divide(_breaks(line.plain, width, indent))
        lines += [first, *(Text(" " * indent).append_text(part) for part in rest)]
    return Text("\n").join(lines)


def _breaks(line: str, width: int, indent: int) -> list[int]:
    """Where to break a line so that no word in it is wider than `width`, as far as dots allow."""
    found, room = [], width - indent
    for word in re.finditer(r"\S+", line):
        start = word.start()
        while cell_len(line[start : word.end()]) > room:
            at = max(line.rfind(".", start + 1, start + room), start)
            at = at if at > start else line.rfind("_", start, start + room - 1) + 1
            if at <= start:
                break
            found.append(at)
            start = at
    return found
