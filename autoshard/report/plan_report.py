"""A plan as a page: what was decided, why, what it costs, and how sure that is."""

from __future__ import annotations

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autoshard.plan_profile import changed_profile
from autoshard.plan_types import Plan
from autoshard.report import format as fmt
from autoshard.report.cost_tables import replicated_verdict, time_table, unit_of
from autoshard.report.decision_tables import collectives_table, fallbacks_table, weights_table
from autoshard.report.layout import show, width_of
from autoshard.report.memory_table import memory_table
from autoshard.report.what_if import what_if

_ROUNDING = 1e-9
"""A gap below this is the rounding of floating-point sums."""


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print `plan` as tables: weights, collectives, time and memory, the solver's line.

    Laid out for the console's width; from 140 columns on, reasons stand in the tables, below that
    under them.
    """
    console = console or Console()
    width = width_of(console)
    sections = (
        header(plan, width),
        weights_table(plan, width),
        collectives_table(plan, width),
        fallbacks_table(plan, width),
        time_table(plan, width),
        memory_table(plan, width),
        what_if(plan, width),
        notes(plan),
        solver_line(plan),
    )
    for section in sections:
        if section is not None:
            show(console, section, "")


def header(plan: Plan, width: int) -> Panel:
    """What was planned, for what, and the result in one sentence."""
    ranks = fmt.plural(plan.mesh.size, "rank")
    training = (
        f"a training step with {plan.optimizer.name}" if plan.mode == "train" else "inference"
    )
    budget = plan.memory_budget_bytes
    lines = {
        "model": plan.model,
        "mesh": f"{plan.mesh}, {ranks} of {plan.hardware}",
        "planned for": f"{training}, search {plan.search}"
        + (f", at most {fmt.size(budget)} a rank" if budget is not None else "")
        + ("" if plan.uniform else ", repeated layers may differ"),
        "inputs": "\n".join(plan.inputs) or "unknown",
    }
    if plan.constraints:
        lines["constraints"] = "\n".join(map(" = ".join, plan.constraints))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", width=11)
    grid.add_column(overflow="fold")
    for key, value in lines.items():
        grid.add_row(key, Text(value, style="bold" if key == "model" else ""))
    verdict = Text.assemble(
        (fmt.seconds(plan.cost.step_s), "bold"),
        f" a {unit_of(plan)}, ",
        (fmt.size(plan.cost.memory.peak_bytes), "bold"),
        " a rank at the peak",
    )
    parts = [grid, Text(), verdict]
    if sentence := replicated_verdict(plan):
        parts.append(sentence)
    return Panel(
        Group(*parts), title="autoshard plan", title_align="left", width=width, padding=(0, 1)
    )


def notes(plan: Plan) -> Group | None:
    """The plan's own sentences: what was not sharded and why, limits met, costs of an older profile."""
    told = changed_profile(plan)
    if not plan.notes and not told:
        return None
    grid = Table.grid(padding=(0, 1, 0, 0))
    for note in plan.notes:
        grid.add_row("•", Text(note, overflow="fold"))
    if told:
        grid.add_row("•", Text(told, style="yellow", overflow="fold"))
    return Group(Text("Notes", style="bold underline"), grid)


def solver_line(plan: Plan) -> Text:
    """How the plan was found, and how far from the optimum it can be at most."""
    solver = plan.solver
    parts = [
        f"objective {fmt.seconds(solver.objective_s)}",
        f"bound {fmt.seconds(solver.bound_s)}",
        f"gap {fmt.percent(solver.gap if abs(solver.gap) > _ROUNDING else 0.0)}",
        f"{solver.binaries:,} binaries",
        f"{solver.constraints:,} constraints",
    ]
    if solver.wall_s:
        parts.append(f"found in {fmt.seconds(solver.wall_s)}")
    style = "green" if solver.status.startswith("optimal") else "yellow"
    return Text.assemble(
        ("Solver  ", "bold underline"), f"{solver.name}: ", (solver.status, style),
        " · ", " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts),
    )  # fmt: skip
