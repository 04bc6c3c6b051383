"""Hardware profiles as a table, and one of them in full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoshard.report import format as fmt
from autoshard.report.layout import Column, show, table, width_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoshard.cost.hardware import Hardware, Link


def print_hardware(profiles: Sequence[Hardware], console: Console | None = None) -> None:
    """Print a row for each of `profiles`: its name, memory, peak rates and links."""
    console = console or Console()
    width = width_of(console)
    columns = [
        Column("hardware"),
        Column("memory", number=True),
        Column("peak", number=True),
        Column("links in and between nodes", flexible=True),
    ]
    rows = [
        [
            Text(profile.name, style="bold"),
            f"{_bytes(profile.memory_bytes)}\n{_rate(profile.memory_bandwidth_bytes_s)}",
            f"{_flops(profile.peak('bfloat16'))} bfloat16\n{_flops(profile.peak('float32'))} float32",
            "\n".join(f"{link.name}: {_rate(link.bandwidth_bytes_s)}" for link in _links(profile)),
        ]
        for profile in profiles
    ]
    show(console, table(width, columns, rows))


def print_profile(profile: Hardware, console: Console | None = None) -> None:
    """Print all of `profile`, and where its numbers are from."""
    console = console or Console()
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    memory, compute = fmt.percent(profile.memory_efficiency), fmt.percent(profile.matmul_efficiency)
    facts = {
        "memory": f"{_bytes(profile.memory_bytes)}, {_rate(profile.memory_bandwidth_bytes_s)}, "
        f"of which programs reach {memory}",
        "peak": ", ".join(f"{_flops(rate)} {dtype}" for dtype, rate in profile.peak_flops),
        "": f"of which large matrix products reach {compute}",
        **_optional(profile),
        "an operator": f"takes {fmt.seconds(profile.launch_s)} at least",
        "in a node": f"{fmt.plural(profile.ranks_per_node, 'rank')}, {_link(profile.intra)}",
        "between nodes": _link(profile.inter),
        "source": " ".join(profile.source.split()),
    }
    for label, fact in facts.items():
        grid.add_row(label, Text(fact))
    show(console, Text(profile.name, style="bold"), grid)


def _optional(profile: Hardware) -> dict[str, str]:
    """What a profile may leave out."""
    facts = {}
    if profile.vector_flops is not None:
        facts["elementwise"] = f"{_flops(profile.vector_flops)}"
    for kind, part in profile.efficiencies:
        facts[kind] = f"{_flops(profile.peak('float32') * part)} float32"
    if profile.update_bandwidth_bytes_s is not None:
        facts["optimizer"] = f"moves {_rate(profile.update_bandwidth_bytes_s)}"
    if profile.step_s or profile.parameter_s or profile.conversion_s:
        facts["a step"] = (
            f"{fmt.seconds(profile.step_s)}, {fmt.seconds(profile.parameter_s)} a parameter, "
            f"{fmt.seconds(profile.conversion_s)} a conversion"
        )
    return facts


def _links(profile: Hardware) -> tuple[Link, Link]:
    return profile.intra, profile.inter


def _link(link: Link) -> str:
    return f"{link.name}: {_rate(link.bandwidth_bytes_s)}, {fmt.seconds(link.latency_s)} a step"


def _bytes(count: int) -> str:
    return fmt.rate(count, "B")


def _rate(value: float) -> str:
    return fmt.rate(value, "B/s")


def _flops(value: float) -> str:
    return fmt.rate(value, "FLOP/s")
