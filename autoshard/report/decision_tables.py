"""The tables of what was decided: weights, collectives, and operators without a rule."""

from __future__ import annotations

import math

from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoshard.plan_types import CollectiveRecord, Plan, WeightRecord
from autoshard.report import format as fmt
from autoshard.report.fold import WeightRow, fold_collectives, fold_weights, whole_bytes
from autoshard.report.layout import WIDE, Cell, Column, table

SPLIT_STYLES = {"column": "cyan", "row": "magenta", "replicated": "dim"}
OTHER_SPLIT = "yellow"
_KIND = "blue"


class _Legend:
    """Reasons by letter, for consoles too narrow for a column of sentences."""

    def __init__(self) -> None:
        self._letters: dict[str, str] = {}

    def letter(self, reason: str) -> str:
        """The letter of `reason`: "a", "b", … "z", "aa"; empty where there is no reason."""
        if not reason:
            return ""
        return self._letters.setdefault(reason, _letter(len(self._letters)))

    def __rich__(self) -> Group:
        grid = Table.grid(padding=(0, 1, 0, 0))
        for reason, letter in self._letters.items():
            grid.add_row(Text(f" {letter}", style="cyan"), Text(reason, style="dim"))
        return Group(grid)


def _letter(index: int) -> str:
    quotient, remainder = divmod(index, 26)
    return (_letter(quotient - 1) if quotient else "") + chr(ord("a") + remainder)


def weights_table(plan: Plan, width: int) -> Group:
    """A row for each decision about weights: what, how it is split, what a rank holds, and why."""
    rows, legend, wide = fold_weights(plan.weights), _Legend(), width >= WIDE
    several_types = len({weight.dtype for weight in plan.weights}) > 1
    columns = [
        Column("weight", flexible=True),
        Column("split"),
        Column("shape → a rank's" if wide else "shape"),
        Column("bytes a rank", number=True) if wide else Column("a rank", number=True),
        Column("why", flexible=True) if wide else Column("why"),
    ]
    cells = [
        [
            _weight_name(row, several_types),
            Text(row.first.split, style=SPLIT_STYLES.get(row.first.split, OTHER_SPLIT)),
            _shapes(row.first, " → " if wide else "\n→ "),
            fmt.size(row.stored_bytes),
            row.first.reason if wide else legend.letter(row.first.reason),
        ]
        for row in rows
    ]
    stored = sum(weight.stored_bytes for weight in plan.weights)
    footer = ["in all", "", "", fmt.size(stored), ""]
    parts = [_weights_title(plan), Text(), table(width, columns, cells, footer)]
    return Group(*parts) if wide else Group(*parts, Text(), legend)


def _weights_title(plan: Plan) -> Text:
    """How many weights, of what size and type, and how much of them one rank stores."""
    elements = sum(math.prod(weight.shape) for weight in plan.weights)
    types = ", ".join(sorted({weight.dtype for weight in plan.weights}))
    whole = sum(whole_bytes(weight) for weight in plan.weights)
    stored = sum(weight.stored_bytes for weight in plan.weights)
    share = f"; a rank stores {fmt.percent(stored / whole)}" if whole else ""
    return Text.assemble(
        ("Weights", "bold underline"),
        f"  {fmt.plural(len(plan.weights), 'tensor')}, {fmt.amount(elements)} parameters",
        f", {fmt.size(whole)} of {types}" if types else "",
        share,
    )


def _weight_name(row: WeightRow, with_type: bool) -> Text:
    """The row's name; below it what else a reader must know of it."""
    weight = row.first
    remarks = [f"layers {row.layers}"] if row.layers else []
    remarks += [f"tied: {', '.join(weight.fqns[1:])}"] if len(weight.fqns) > 1 else []
    remarks += [] if weight.trainable else ["frozen"]
    remarks += [weight.dtype] if with_type else []
    name = Text(row.name)
    for remark in remarks:
        name.append(f"\n  {remark}", style="dim")
    return name


def _shapes(weight: WeightRecord, arrow: str) -> str:
    whole, local = fmt.shape(weight.shape), fmt.shape(weight.local_shape)
    return whole if whole == local else f"{whole}{arrow}{local}"


def collectives_table(plan: Plan, width: int) -> Group:
    """A row for each kind of collective at one place: when, where, how much and why."""
    title = Text("Collectives", style="bold underline")
    if not plan.collectives:
        return Group(title.append_text(Text("  none", style="not bold not underline")))
    rows = sorted(fold_collectives(plan.collectives), key=lambda row: row.phase != "forward")
    count = sum(row.count for row in rows)
    total = fmt.seconds(sum(row.count * row.time_s for row in rows))
    title = Text.assemble(title, f"  {count:,} in a step, {total}")
    if width >= WIDE:
        return Group(title, Text(), _wide_collectives(plan, rows, width, total))
    legend = _Legend()
    narrow = _narrow_collectives(plan, rows, width, legend, total)
    return Group(title, Text(), narrow, Text(), legend)


def _wide_collectives(plan: Plan, rows: list[CollectiveRecord], width: int, total: str) -> Table:
    columns = [
        Column("collective"),
        Column("phase"),
        Column("where", flexible=True, share=3),
        Column("tensor"),
        Column("bytes", number=True),
        Column("count", number=True),
        Column("time in all", number=True),
        Column("why", flexible=True, share=4),
    ]
    cells = [
        [
            Text.assemble((row.kind, _KIND), _axis(row, plan)),
            row.phase,
            _place(row),
            fmt.shape(row.tensor_shape),
            fmt.size(row.bytes),
            f"×{row.count:,}",
            fmt.seconds(row.count * row.time_s),
            row.reason,
        ]
        for row in rows
    ]
    return table(width, columns, cells, ["in all", "", "", "", "", "", total, ""])


def _narrow_collectives(
    plan: Plan, rows: list[CollectiveRecord], width: int, legend: _Legend, total: str
) -> Table:
    columns = [
        Column("collective"),
        Column("where", flexible=True),
        Column("tensor", number=True),
        Column("count", number=True),
        Column("in all", number=True),
        Column("why"),
    ]
    cells: list[list[Cell]] = [
        [
            Text.assemble((row.kind, _KIND), f"\n{row.phase}", _axis(row, plan)),
            _place(row),
            f"{fmt.shape(row.tensor_shape)}\n{fmt.size(row.bytes)}",
            f"×{row.count:,}",
            fmt.seconds(row.count * row.time_s),
            legend.letter(row.reason),
        ]
        for row in rows
    ]
    return table(width, columns, cells, ["in all", "", "", "", total, ""])


def _axis(row: CollectiveRecord, plan: Plan) -> str:
    """The mesh axis the collective runs on, where there are several."""
    return f" on {row.axis}" if len(plan.mesh.axes) > 1 else ""


def _place(row: CollectiveRecord) -> Text:
    return Text.assemble(row.module or "(the model itself)", (f"\n  {fmt.operator(row.op)}", "dim"))


def fallbacks_table(plan: Plan, width: int) -> Group | None:
    """The operators that ran whole on every rank for want of a rule; None where there are none."""
    if not plan.fallbacks:
        return None
    cost = sum(row.cost_s for row in plan.fallbacks)
    share = cost / plan.cost.step_s if plan.cost.step_s else 0.0
    title = Text.assemble(
        ("Operators without a rule", "bold underline"),
        "  run whole on every rank: ",
        (f"{fmt.seconds(cost)}, {fmt.percent(share)} of the step", "yellow"),
    )
    columns = [
        Column("operator", flexible=True, share=3),
        Column("count", number=True),
        Column("time in all", number=True),
        Column("where", flexible=True, share=4),
    ]
    cells = [
        [
            row.op,
            f"×{row.count:,}",
            fmt.seconds(row.cost_s),
            "\n".join(module or "(the model itself)" for module in row.modules),
        ]
        for row in sorted(plan.fallbacks, key=lambda row: (-row.cost_s, row.op))
    ]
    hint = Text("autoshard.rules.register(op, rule) teaches a rule.", style="dim")
    return Group(title, Text(), table(width, columns, cells), hint)
