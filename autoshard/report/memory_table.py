"""The table of what a rank holds when most is held, beside known plans of the same model."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from autoshard.plan_types import Memory, Plan
from autoshard.report import format as fmt
from autoshard.report.cost_tables import compared, plan_name
from autoshard.report.layout import Column, table

COLUMNS = {
    "weights": ("weights", "buffers"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "saved": ("activations",),
    "transient": ("transient", "gathered"),
}
"""Header → the parts that it sums up."""
_NAMES = {
    "activations": "what is saved for backward",
    "optimizer": "optimizer state",
    "gathered": "gathered weights",
    "transient": "transient memory",
    "buffers": "buffers and inputs",
}


def shown(memory: Memory) -> list[int]:
    """The numbers of a row but the last: bytes at the peak, by column."""
    parts = memory.parts
    return [sum(parts[name] for name in names) for names in COLUMNS.values()]


def memory_table(plan: Plan, width: int) -> Group:
    """The bytes a rank holds at the peak of a step, by what they are for."""
    columns = [
        Column("plan", flexible=True),
        *(Column(header, number=True) for header in (*COLUMNS, "peak")),
    ]
    cells = []
    for name, cost in compared(plan):
        peak = cost.memory.peak_bytes
        shown_peak = Text(fmt.size(peak), style=_peak_style(peak, plan))
        cells.append([plan_name(name), *map(fmt.size, shown(cost.memory)), shown_peak])
    at = plan.cost.memory.peak_at
    title = Text.assemble(
        ("Memory of a rank", "bold underline"),
        f"  predicted, when most is held{f': {at}' if at else ''}",
    )
    group = [title, Text(), table(width, columns, cells), _most(plan.cost.memory)]
    if (budget := plan.memory_budget_bytes) is not None:
        group.append(_budget_line(plan.cost.memory, budget))
    return Group(*group)


def _most(memory: Memory) -> Text:
    """Each part at its own greatest, which is not at one time."""
    most = {
        "gradients": memory.gradients_bytes,
        "saved": memory.activations_bytes,
        "transient": memory.transient_bytes,
        "gathered": memory.gathered_bytes,
    }
    told = ", ".join(f"{name} {fmt.size(size)}" for name, size in most.items() if size)
    beside = {
        "buffers and inputs": memory.buffers_bytes,
        "the allocator's slack": memory.slack_bytes,
    }
    within = "".join(f"; {name} {fmt.size(size)}" for name, size in beside.items() if size)
    return Text(f"At most, each at its own time: {told or 'nothing'}{within}.", style="dim")


def _peak_style(peak: int, plan: Plan) -> str:
    over = plan.memory_budget_bytes is not None and peak > plan.memory_budget_bytes
    return "red" if over else "bold"


def _budget_line(memory: Memory, budget: int) -> Text:
    peak = memory.peak_bytes
    if peak > budget:
        text = f"Over the budget of {fmt.size(budget)} by {fmt.size(peak - budget)}."
        return Text(text, style="bold red")
    largest, size = max(memory.parts.items(), key=lambda item: item[1])
    return Text(
        f"Within the budget of {fmt.size(budget)}, with {fmt.size(budget - peak)} to spare. What takes "
        f"most of it: {_NAMES.get(largest, largest)}, {fmt.percent(size / peak if peak else 0.0)}.",
        style="green",
    )
