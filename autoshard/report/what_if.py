"""The section on what would be, were links, batch or sequence other than planned: numbers and a plot."""

from __future__ import annotations

import math
import re

from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoshard.plan_types import Cost, Part, Plan
from autoshard.report import format as fmt
from autoshard.report.cost_tables import unit_of
from autoshard.report.layout import WIDE, Column, table
from autoshard.what_if import (
    RANGE,
    SYMBOLS,
    Crossing,
    crossings,
    elasticity,
    narrowed,
    picked,
    seconds,
)

_WORDS = {
    "bandwidth": "bandwidth of links",
    "latency": "latency of links",
    "batch": "batch",
    "sequence": "sequence",
}
_MARKS = {
    "": "·",
    "replicated": "r",
    "megatron": "m",
    "data_parallel": "d",
    "fully_sharded": "f",
    "all": "a",
}
_STYLES = {"·": "bold cyan", "r": "magenta", "m": "yellow", "d": "green", "f": "blue", "a": "red"}
_HEIGHT = 9
_MOST = 4.0
"""Plans slower or faster by more than this are beyond the plot's edge."""
_SMALL = 5e-4
"""Share of a step below which a summand is left out."""
_EXACT = 1e-4
"""Relative width to which a break-even is narrowed before it is shown."""
Found = list[tuple[str, Crossing]]


def what_if(plan: Plan, width: int) -> Group | None:
    """How the step moves, where known plans overtake, a plot; None where the plan has no formula."""
    cost = plan.cost
    if not cost.terms or plan.mesh.size == 1:
        return None
    known = {name: other for name, other in cost.baselines.items() if other.terms}
    found = [(n, narrowed(cost, known[n], c, _EXACT)) for n, c in crossings(cost, known)]
    moving = [s for s in SYMBOLS if elasticity(cost, s) or any(c.symbol == s for _, c in found)]
    if not moving:
        return None
    parts = [
        _title(plan),
        Text(),
        _table(plan, moving, width),
        Text(),
        _formula(cost, width),
        Text(),
    ]
    parts.append(_break_evens(plan, found, width) if found else _none(known, moving))
    plots = [_plot(plan, known, found, symbol, width) for symbol in _plotted(found, width)]
    if len(plots) == 2:
        beside = Table.grid(padding=(0, 6, 0, 0))
        beside.add_row(*plots)
        parts += [Text(), beside]
    elif plots:
        parts += [Text(), *plots]
    return Group(*parts)


def _title(plan: Plan) -> Text:
    return Text.assemble(
        ("What if", "bold underline"),
        f"  the {unit_of(plan)} of this plan, were something else other than planned",
    )


def _table(plan: Plan, moving: list[str], width: int) -> Table:
    columns = [
        Column(""),
        Column("half of it", number=True),
        Column("as planned", number=True),
        Column("twice it", number=True),
        Column(f"1% more makes the {unit_of(plan)}", flexible=True),
    ]
    cells = [
        [
            _words(plan, symbol),
            fmt.seconds(seconds(plan.cost, {symbol: 0.5})),
            fmt.seconds(plan.cost.step_s),
            fmt.seconds(seconds(plan.cost, {symbol: 2.0})),
            _one_percent(elasticity(plan.cost, symbol)),
        ]
        for symbol in moving
    ]
    return table(width, columns, cells)


def _words(plan: Plan, symbol: str) -> str:
    planned = _planned(plan, symbol)
    return _WORDS[symbol] + (f" ({planned:,})" if planned else "")


def _planned(plan: Plan, symbol: str) -> int | None:
    """The batch or the sequence that was planned for, as the first input that has one says."""
    index = {"batch": 0, "sequence": 1}.get(symbol)
    if index is None:
        return None
    for text in plan.inputs:
        shape = re.search(r"\[([\d, ]+)\]$", text)
        sizes = [int(size) for size in shape[1].split(",")] if shape else []
        if len(sizes) > index and (index == 0 or len(sizes) in (2, 3)):
            return sizes[index]
    return None


def _one_percent(value: float) -> str:
    """What a hundredth more does: "0.27% shorter"."""
    change = fmt.percent(abs(value) / 100)
    if not value:
        return "no longer and no shorter"
    return f"{change} {'longer' if value > 0 else 'shorter'}"


def _formula(cost: Cost, width: int) -> Text:
    """The step's time as a sum, as long as its kernels are bound by what bounds them as planned."""
    totals: dict[tuple[str, int, int], float] = {}
    for term in cost.terms:
        for part in term.options[picked(term, {})[1]]:
            link = part.scales_with if part.scales_with in ("bandwidth", "latency") else ""
            key = (link, part.batch, part.sequence)
            totals[key] = totals.get(key, 0.0) + part.seconds
    ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    shown = [
        Text(_summand(Part(s, *key)), "bold") for key, s in ordered if s > _SMALL * cost.step_s
    ]
    for summand in shown[:-1]:
        summand.append(" +", "not bold")
    rest = [] if len(shown) == len(totals) else [Text("+ …, each symbol 1 as planned")]
    return _wrapped([Text("about"), *shown, *(rest or [Text("(each symbol 1 as planned)")])], width)


def _wrapped(items: list[Text], width: int) -> Text:
    """Items side by side, in lines of at most `width` cells: rich would break inside them."""
    lines: list[list[Text]] = [[]]
    for item in items:
        if lines[-1] and sum(i.cell_len + 1 for i in lines[-1]) + item.cell_len > width:
            lines.append([])
        lines[-1].append(item)
    return Text("\n").join(Text(" ").join(line) for line in lines)


def _summand(part: Part) -> str:
    def power(name: str, exponent: int) -> str:
        raised = {0: "", 1: f"·{name}", 2: f"·{name}²"}
        return raised.get(exponent, f"·{name}^{exponent}")

    link = {"bandwidth": "/bandwidth", "latency": "·latency"}.get(part.scales_with, "")
    text = power("batch", part.batch) + power("sequence", part.sequence) + link
    return fmt.seconds(part.seconds) + text


# --- break-evens --------------------------------------------------------------------------------


def _break_evens(plan: Plan, found: Found, width: int) -> Table:
    columns = [
        Column("changes places at"),
        Column("", number=True),
        Column("where", flexible=True),
        Column("both take", number=True),
    ]
    cells = []
    for names, crossing in _together(found):
        planned = _planned(plan, crossing.symbol)
        at = fmt.times(crossing.at)
        if planned:
            at += f" = {fmt.digits(crossing.at * planned)}"
        both = fmt.seconds(seconds(plan.cost, {crossing.symbol: crossing.at}))
        cells.append([_WORDS[crossing.symbol], at, _beyond(names, crossing), both])
    return table(width, columns, cells)


def _together(found: Found) -> list[tuple[list[str], Crossing]]:
    """Break-evens with the plans that have the same one joined."""
    joined: list[tuple[list[str], Crossing]] = []
    for name, crossing in found:
        names, last = joined[-1] if joined else ([], crossing)
        same = (last.symbol, last.beyond) == (crossing.symbol, crossing.beyond)
        if names and same and abs(math.log(last.at / crossing.at)) < 2 * _EXACT:
            names.append(name)
        else:
            joined.append(([name], crossing))
    return joined


def _beyond(names: list[str], crossing: Crossing) -> Text:
    """Which plan is the faster one on the far side of a break-even, seen from what was planned."""
    side = "above" if crossing.at >= 1 else "below"
    others = (" and ".join(map(_said, names)), "bold")
    if crossing.beyond == side:
        return Text.assemble(
            f"{side} it, ", others, f" {'is' if len(names) == 1 else 'are'} faster"
        )
    return Text.assemble(f"{side} it, this plan is faster than ", others)


def _said(name: str) -> str:
    return "search all" if name == "all" else name.replace("_", " ")


def _none(known: dict[str, Cost], moving: list[str]) -> Text:
    what = " and ".join(_WORDS[symbol] for symbol in moving)
    text = f"From 1/{RANGE[1]:.0f} to {RANGE[1]:.0f} times the {what}, "
    if not known:
        return Text(text + "there is no known plan to compare with.")
    return Text(text + "no known plan changes places with this one.")


# --- the plot -----------------------------------------------------------------------------------


def _plotted(found: Found, width: int) -> list[str]:
    """The symbols worth a plot: those with the nearest break-evens, size before links."""
    nearest: dict[str, float] = {}
    for _, crossing in found:
        far = abs(math.log(crossing.at))
        nearest[crossing.symbol] = min(far, nearest.get(crossing.symbol, far))
    order = [s for s in ("batch", "bandwidth", "sequence", "latency") if s in nearest]
    if "batch" in order and "sequence" in order:
        order.remove("sequence")  # mostly the same curve
    return order[: 2 if width >= WIDE else 1]


def _plot(plan: Plan, known: dict[str, Cost], found: Found, symbol: str, width: int) -> Group:
    """Other plans' step time as a multiple of this plan's, over one symbol; both scales logarithmic."""
    columns = min(57, (width - 38) // 2 if width >= WIDE else width - 18)
    names = list(dict.fromkeys(n for n, crossing in found if crossing.symbol == symbol))
    multiples = [RANGE[0] * (RANGE[1] / RANGE[0]) ** (i / (columns - 1)) for i in range(columns)]
    own = [seconds(plan.cost, {symbol: at}) for at in multiples]
    ratios = {
        name: [seconds(known[name], {symbol: at}) / s for at, s in zip(multiples, own, strict=True)]
        for name in names
    }
    reach = max(abs(math.log(r)) for values in ratios.values() for r in values)
    reach = min(max(reach, math.log(1.05)), math.log(_MOST))
    middle = _HEIGHT // 2
    cells = [[" "] * columns for _ in range(_HEIGHT)]
    for name, values in ratios.items():
        for x, value in enumerate(values):
            row = middle - round(math.log(value) / reach * middle)
            if 0 <= row < _HEIGHT:
                cells[row][x] = _mark(name)
    cells[middle] = [_MARKS[""] if mark == " " else mark for mark in cells[middle]]
    used = [row for row in range(_HEIGHT) if any(mark != " " for mark in cells[row])]
    labels = {
        row: f"{fmt.times(math.exp(reach * (1 - row / middle)))} as long"
        for row in (used[0], used[-1])
    } | {middle: "this plan"}
    lines = [
        Text(f"{labels.get(row, ''):>14} │").append_text(_coloured("".join(cells[row])))
        for row in range(used[0], used[-1] + 1)
    ]
    title = Text(f"the {unit_of(plan)} by {_WORDS[symbol]}:")
    legend = [_coloured(_mark(name), _said(name)) for name in names]
    return Group(_wrapped([title, *legend], columns + 16), *lines, *_axis(plan, symbol, columns))


def _mark(name: str) -> str:
    return _MARKS.get(name, name[:1])


def _coloured(marks: str, words: str = "") -> Text:
    text = Text(f"{marks} {words}" if words else marks)
    for mark, style in _STYLES.items():
        for at, letter in enumerate(marks):
            if letter == mark:
                text.stylize(style, at, at + 1)
    return text


def _axis(plan: Plan, symbol: str, columns: int) -> list[Text]:
    """The rule below the plot, and what stands at its ends and in its middle."""
    middle = columns // 2
    rule = "─" * middle + "┴" + "─" * (columns - middle - 1)
    planned = _planned(plan, symbol)
    centre = f"as planned ({planned:,})" if planned else "as planned"
    first, last = f"1/{RANGE[1]:.0f}", fmt.times(RANGE[1])
    line = list(f"{first:<{columns - len(last)}}{last}")
    start = middle - len(centre) // 2
    line[start : start + len(centre)] = centre
    indent = " " * 15
    return [Text(f"{indent}└{rule}"), Text(f"{indent} {''.join(line)}", style="dim")]
