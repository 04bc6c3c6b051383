"""The tables of what a plan costs, beside known plans of the same model."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from autoshard.plan_types import Cost, Plan
from autoshard.report import format as fmt
from autoshard.report.layout import Column, table

THIS = "this plan"
REPLICATED = "replicated"
_NAMES = {"all": "search all"}
_COMPUTE, _COMMUNICATE = "█", "░"


def unit_of(plan: Plan) -> str:
    """What a plan's time is the time of."""
    return "step" if plan.mode == "train" else "forward pass"


def replicated_verdict(plan: Plan) -> Text | None:
    """This plan's time beside that of the whole model on every rank; in red where it is slower."""
    baseline = plan.cost.baselines.get(REPLICATED)
    if baseline is None or plan.cost.step_s <= 0 or baseline.step_s <= 0:
        return None
    ratio = baseline.step_s / plan.cost.step_s
    ranks, whole = fmt.plural(plan.mesh.size, "rank"), fmt.seconds(baseline.step_s)
    if ratio < 1:
        return Text(
            f"SLOWER than no sharding at all: {ranks} together are predicted to take "
            f"{fmt.times(1 / ratio)} the {whole} that one rank takes alone.",
            style="bold red",
        )
    if ratio == 1:
        return Text(f"as fast as one rank alone: {ranks} together gain nothing", style="yellow")
    return Text.assemble(
        (f"{fmt.times(ratio)} as fast", "green"),
        f" with {ranks} as one rank alone ({whole}), which would hold ",
        f"{fmt.size(baseline.memory.peak_bytes)}",
    )


def compared(plan: Plan) -> list[tuple[str, Cost]]:
    """This plan, then the baselines, fastest first."""
    others = sorted(plan.cost.baselines.items(), key=lambda item: (item[1].step_s, item[0]))
    return [(THIS, plan.cost), *others]


def plan_name(name: str) -> Text:
    """A plan's name in a table; this plan's stands out."""
    return Text(_NAMES.get(name, name.replace("_", " ")), style="bold" if name == THIS else "")


def time_table(plan: Plan, width: int) -> Group:
    """The predicted time of a step, in compute and communication, with bars to one scale."""
    rows = compared(plan)
    columns = [
        Column("plan"),
        Column("step", number=True),
        Column("compute", number=True),
        Column("communicate", number=True),
        Column("relative", number=True),
        Column("", flexible=True),
    ]
    longest = max(cost.step_s for _, cost in rows)
    room = min(60, width - 64)
    cells = [
        [
            plan_name(name),
            Text(fmt.seconds(cost.step_s), style="bold" if name == THIS else ""),
            fmt.seconds(cost.compute_s),
            fmt.seconds(cost.comm_s),
            _ratio(cost.step_s, plan.cost.step_s, name),
            _bar(cost, longest, room),
        ]
        for name, cost in rows
    ]
    title = Text.assemble(
        (f"Time of a {unit_of(plan)}", "bold underline"),
        "  predicted  ", (_COMPUTE, "cyan"), " compute  ", (_COMMUNICATE, "red"), " communicate, with local copies",
    )  # fmt: skip
    return Group(title, Text(), table(width, columns, cells))


def _ratio(value: float, of: float, name: str) -> str:
    return "" if name == THIS or not of else fmt.times(value / of)


def _bar(cost: Cost, longest: float, room: int) -> Text:
    """A bar `room` cells long for the time `longest`; what takes time has one cell at least."""
    scale = room / longest if longest else 0.0
    parts = [
        (sign * max(round(time * scale), time > 0), style)
        for sign, style, time in (
            (_COMPUTE, "cyan", cost.compute_s),
            (_COMMUNICATE, "red", cost.comm_s),
        )
    ]
    return Text.assemble(*parts)
