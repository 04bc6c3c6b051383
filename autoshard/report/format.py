"""Numbers as people write them: three significant digits and a unit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autoshard.mesh import Mesh
from autoshard.placement import Layout, Shard

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def seconds(value: float) -> str:
    """A time in seconds as text: 0.00131 → "1.31 ms"."""
    if not math.isfinite(value):
        return "unknown"
    for unit, name in _TIMES:
        if abs(value) >= 0.9995 * unit:
            return f"{_three(value / unit)} {name}"
    return "0 s" if value == 0 else f"{value / 1e-9:.2g} ns"


def size(count: int) -> str:
    """A number of bytes as text: 1536 → "1.5 KiB"."""
    return _scaled(count, 1024, _BINARY)


def rate(value: float, unit: str) -> str:
    """A number by thousands: (3.35e12, "B/s") → "3.35 TB/s"; "unlimited" where it is infinite."""
    if not math.isfinite(value):
        return "unlimited"
    number, _, prefix = _scaled(value, 1000, _DECIMAL).partition(" ")
    return f"{number} {prefix}{unit}"


def amount(value: int) -> str:
    """How many, in words: 8030261248 → "8.03 billion"."""
    if value < 1_000_000:
        return f"{value:,}"
    return _scaled(value / 1e6, 1000, ("million", "billion", "trillion", "quadrillion"))


def percent(fraction: float) -> str:
    """A fraction as text: 0.0312 → "3.1%"; what is not nothing is never shown as nothing."""
    if not math.isfinite(fraction):
        return "unknown"
    if fraction != 0 and abs(fraction) < 0.0005:
        return f"{100 * fraction:.1g}%"
    return f"{100 * fraction:.1f}".removesuffix(".0") + "%"


def times(ratio: float) -> str:
    """A ratio as text: 6.613 → "6.61×"."""
    return f"{_three(ratio)}×" if math.isfinite(ratio) else "unknown"


def digits(value: float) -> str:
    """A number to three significant digits: 1234.5 → "1,230"."""
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 100 else _three(value)


def error(value: float) -> str:
    """A relative error as text: 2.3456e-12 → "2.3e-12"."""
    return "0" if value == 0 else f"{value:.1e}"


def shape(dims: Sequence[int]) -> str:
    """A shape as text: (4, 2048) → "4×2048"."""
    return "×".join(map(str, dims)) if dims else "scalar"


def operator(name: str) -> str:
    """An operator's name as people say it: "aten.linear.default" → "linear"."""
    return name.removeprefix("aten.").removesuffix(".default")


def plural(count: int, noun: str) -> str:
    """How many of something: (2, "rank") → "2 ranks"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def layout(placements: Layout, mesh: Mesh) -> str:
    """A layout in words: "dimension 0 over tp=8 in 3 blocks", or "whole on every rank"."""
    parts = []
    for placement, axis in zip(placements, mesh.axes, strict=True):
        if isinstance(placement, Shard):
            blocks = f" in {placement.blocks} blocks" if placement.blocks > 1 else ""
            parts.append(f"dimension {placement.dim} over {axis.name}={axis.size}{blocks}")
    return ", ".join(parts) or "whole on every rank"


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers with runs joined: (0, 1, 2, 5) → "0–2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    scale = 0
    while abs(value) >= base - 0.5 and scale < len(units) - 1:
        value /= base
        scale += 1
    return f"{_three(value)} {units[scale]}".rstrip()


def _three(value: float) -> str:
    """Three significant digits, never an exponent, no zeros at the end of a fraction."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
