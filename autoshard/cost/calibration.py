"""From measured times to a hardware profile, with what it leaves unexplained.

Each number is fitted to the measurements it rules, in an order in which those before are known: launches,
memory, products, elementwise arithmetic, attention and convolution, the fixed times of a step, links.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from autoshard.cost.comm import coefficients, collective_s
from autoshard.cost.compute import kernel_parts
from autoshard.cost.fit import checked, linear, scale
from autoshard.cost.hardware import Hardware
from autoshard.cost.link import KINDS, Link
from autoshard.errors import CalibrationError


@dataclass(frozen=True)
class Measured:
    """One measurement.

    Attributes:
        group: what it is fitted with: "launch", "memory", "product", "vector", "attention",
            "convolution", "update", "parameter", "conversion", or a collective's kind.
        label: in words: "512×512×512 float32".
        seconds: of one run.
        flops, bytes: arithmetic and traffic of a kernel; of a collective, the whole tensor's bytes.
        dtype: that a kernel computes in.
        count: launches of a kernel, parameters of a step, conversions in a chain.
        ranks, stride: of a collective's group, as `Hardware.link` takes them.
    """

    group: str
    label: str
    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = "float32"
    count: int = 1
    ranks: int = 1
    stride: int = 1


@dataclass(frozen=True)
class Fit:
    """A measurement beside what the profile says of it."""

    measured: Measured
    predicted_s: float

    @property
    def residual(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured.seconds - 1


@dataclass(frozen=True)
class Calibration:
    """A fitted profile, every measurement beside it, and what was not measured."""

    hardware: Hardware
    fits: tuple[Fit, ...]
    assumed: tuple[str, ...]


def calibrated(base: Hardware, measured: Sequence[Measured]) -> Calibration:
    """The profile that explains `measured` best; what they do not show is as in `base`.

    Args:
        base: whose `synchronous`, `ranks_per_node` and names are those of the machine.
        measured: at least launches, memory and products.

    Raises:
        CalibrationError: a measurement is missing, zero or not finite.
    """
    for item in measured:
        checked(item.seconds, item.label)
    hardware = replace(base, matmul_efficiency=1.0, memory_efficiency=1.0, efficiencies=())
    for step in (_launch, _memory, _products, _vector, _special, _fixed):
        hardware = step(hardware, measured)
    hardware, assumed = _links(hardware, measured)
    fits = [Fit(item, _predicted(hardware, item)) for item in measured]
    return Calibration(hardware, tuple(fits), assumed)


def _of(measured: Iterable[Measured], *groups: str) -> list[Measured]:
    return [item for item in measured if item.group in groups]


def _needed(measured: Iterable[Measured], group: str) -> list[Measured]:
    found = _of(measured, group)
    if not found:
        raise CalibrationError(f"No {group} was measured.", fix="Calibrate again.")
    return found


def _predicted(hardware: Hardware, item: Measured) -> float:
    """What a profile says that a measurement takes."""
    if item.group in KINDS:
        link = hardware.link(item.ranks, item.stride)
        return collective_s(item.group, item.bytes, item.ranks, link)
    if item.group == "parameter":
        return hardware.step_s + item.count * hardware.parameter_s
    if item.group == "update":
        return item.bytes / hardware.update_rate
    if item.group == "conversion":
        return item.count * (hardware.conversion_s + hardware.launch_s)
    kind = "vector" if item.group in ("launch", "memory") else item.group
    parts = kernel_parts(item.flops, item.bytes, item.dtype, hardware, kind, item.count)
    return sum(parts.values())


# --- one rank ------------------------------------------------------------------------------------


def _launch(hardware: Hardware, measured: Sequence[Measured]) -> Hardware:
    found = [item.seconds / item.count for item in _needed(measured, "launch")]
    return replace(hardware, launch_s=statistics.median(found))


def _memory(hardware: Hardware, measured: Sequence[Measured]) -> Hardware:
    items = _needed(measured, "memory")
    rate = _rate(items, lambda rate: replace(hardware, memory_bandwidth_bytes_s=rate))
    return replace(hardware, memory_bandwidth_bytes_s=rate, copy_bandwidth_bytes_s=None)


def _products(hardware: Hardware, measured: Sequence[Measured]) -> Hardware:
    items = _needed(measured, "product")
    peaks = {}
    for dtype in dict.fromkeys(item.dtype for item in items):
        own = [item for item in items if item.dtype == dtype]
        peaks[dtype] = _rate(
            own, lambda rate, dtype=dtype: replace(hardware, peak_flops=((dtype, rate),))
        )
    return replace(hardware, peak_flops=tuple(peaks.items()))


def _vector(hardware: Hardware, measured: Sequence[Measured]) -> Hardware:
    """Elementwise arithmetic, unless memory explains every time as well."""
    items = _of(measured, "vector")
    without = replace(hardware, vector_flops=None)
    bound = [item for item in items if item.seconds > 1.2 * _predicted(without, item)]
    if not bound:
        return without
    rate = _rate(bound, lambda rate: replace(hardware, vector_flops=rate))
    return replace(hardware, vector_flops=rate)


def _special(hardware: Hardware, measured: Sequence[Measured]) -> Hardware:
    """What attention and convolution reach of the products' rate."""
    found = {}
    for kind in ("attention", "convolution"):
        items = _of(measured, kind)
        if items:
            peak = hardware.peak(items[0].dtype)
            top = replace(hardware, peak_flops=((items[0].dtype, peak * 1e3),))

            def having(rate: float, kind=kind, top=top, peak=peak) -> Hardware:
                return replace(top, efficiencies=((kind, min(1.0, rate / (peak * 1e3))),))

            found[kind] = min(1.0, _rate(items, having) / peak)
    return replace(hardware, efficiencies=tuple(found.items()))


def _rate(items: Sequence[Measured], having: Callable[[float], Hardware]) -> float:
    """The rate that explains these times best."""
    largest = max(max(i.flops, i.bytes) / i.seconds for i in items)

    def predict(rate: float) -> list[float]:
        known = having(rate)
        return [_predicted(known, item) for item in items]

    return scale(predict, [item.seconds for item in items], largest / 100, largest * 10)


def _fixed(hardware: Hardware, measured: Sequence[Measured]) -> Hardware:
    """A step's optimizer; its fixed times, and those of a parameter and of a conversion."""
    steps, chains = _of(measured, "parameter"), _of(measured, "conversion")
    updates = [item.bytes / item.seconds for item in _of(measured, "update")]
    if updates:
        hardware = replace(hardware, update_bandwidth_bytes_s=statistics.median(updates))
    if steps:
        rows = [(1.0, float(item.count)) for item in steps]
        step_s, parameter_s = linear(rows, [item.seconds for item in steps])
        hardware = replace(hardware, step_s=step_s, parameter_s=parameter_s)
    if chains:
        each = statistics.median(item.seconds / item.count for item in chains)
        hardware = replace(hardware, conversion_s=max(0.0, each - hardware.launch_s))
    return hardware


# --- links ---------------------------------------------------------------------------------------


def _links(hardware: Hardware, measured: Sequence[Measured]) -> tuple[Hardware, tuple[str, ...]]:
    """The links inside a node and between nodes, and sentences on those that were not measured."""
    links, assumed = {}, []
    for side, place in (("intra", "inside a node"), ("inter", "between nodes")):
        items = [
            item
            for item in _of(measured, *KINDS)
            if (item.ranks * item.stride <= hardware.ranks_per_node) == (side == "intra")
        ]
        if items:
            links[side] = _link(hardware, getattr(hardware, side), items)
        else:
            assumed.append(
                f"No group {place} was measured: that link is as in profile {hardware.name}."
            )
    return replace(hardware, **links), tuple(assumed)


def _link(hardware: Hardware, link: Link, items: Sequence[Measured]) -> Link:
    """A link's α, launches and bandwidths, from lines through each kind's times.

    A line says what a kind's collectives take at no bytes, and for each byte. What is fixed grows with
    the steps of the algorithm, and by that α is told from the launch: by one kind from another, too.
    """
    lines = {
        (kind, ranks): _line(hardware, link, [i for i in items if (i.group, i.ranks) == key])
        for kind, ranks in dict.fromkeys((item.group, item.ranks) for item in items)
        for key in [(kind, ranks)]
    }
    rows = [(1.0, steps) for steps, _, _ in lines.values()]
    fixed = [at_rest for _, at_rest, _ in lines.values()]
    launch_s, latency_s = linear(rows, fixed) if len(rows) > 1 else (fixed[0], 0.0)
    launches, rates = {}, {}
    for kind in dict.fromkeys(kind for kind, _ in lines):
        own = [line for key, line in lines.items() if key[0] == kind]
        launches[kind] = max(0.0, statistics.median(f - s * latency_s for s, f, _ in own))
        rates[kind] = statistics.median(rate for _, _, rate in own)
    return replace(
        link,
        latency_s=latency_s,
        launch_s=launch_s,
        measured=True,
        bandwidth_bytes_s=rates.get("all_reduce", statistics.median(rates.values())),
        kind_bandwidths_bytes_s=tuple(rates.items()),
        kind_launches_s=tuple(launches.items()),
    )


def _line(hardware: Hardware, link: Link, items: Sequence[Measured]) -> tuple[float, float, float]:
    """Of one kind and size of group: the steps, the seconds at no bytes, and the link's rate."""
    kind, ranks, stride = items[0].group, items[0].ranks, items[0].stride
    unit = replace(link, bandwidth_bytes_s=1.0, kind_bandwidths_bytes_s=())
    wires = replace(link, bandwidth_bytes_s=math.inf, kind_bandwidths_bytes_s=())
    inside = ranks * stride <= hardware.ranks_per_node
    probe = replace(hardware, intra=unit if inside else wires, inter=unit)
    share = probe.link(ranks, stride).bandwidth(kind)
    rows = [(1.0, coefficients(kind, item.bytes, ranks, link)[1] / share) for item in items]
    at_rest, beta = linear(rows, [item.seconds for item in items])
    if not beta:
        raise CalibrationError(
            f"{kind} on {ranks} ranks takes no longer for more bytes.",
            fix="Measure larger sizes, on a machine that does nothing else.",
        )
    return coefficients(kind, 1.0, ranks, link)[0], max(at_rest, 1e-9), 1 / beta
