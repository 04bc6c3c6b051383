"""`autoshard calibrate`: measure this machine, and its links where a process group spans it."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard import __version__
from autoshard.compat import functional_collectives
from autoshard.cost.calibration import Calibration, Measured, calibrated
from autoshard.cost.hardware import Hardware, load_hardware
from autoshard.cost.link import KINDS
from autoshard.errors import CalibrationError, MeshError
from autoshard.report.format import size as size_text
from autoshard.runtime import collectives
from autoshard.runtime.distributed import local_of
from autoshard.runtime.measure import Stopwatch
from autoshard.runtime.operators import operator
from autoshard.runtime.probes import Probe, of, of_compute, of_conversions, of_steps, timed

Progress = Callable[[str, int, int], None]
"""Called with what is measured next, how many are done, and how many there are."""
_NAMES = {
    "H100 PCIE": "h100-pcie",
    "H100": "h100-sxm",
    "H200": "h200-sxm",
    "A100": "a100-sxm",
    "B200": "b200",
    "L40S": "l40s-pcie",
    "MI300X": "mi300x",
}
"""Part of an accelerator's name → the profile whose unmeasured numbers stand for its own."""

_TRIES, _PASSES = 3, 3


@dataclass(frozen=True)
class Group:
    """A process group to measure collectives on.

    Attributes:
        axis: what it is called.
        ranks, stride: as `Hardware.link` takes them.
        name: torch's, of this rank's group.
    """

    axis: str
    ranks: int
    stride: int
    name: str


def calibrate(
    name: str = "measured",
    *,
    device: torch.device | None = None,
    axes: Sequence[tuple[str, int]] = (),
    quick: bool = False,
    base: Hardware | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Measure what this machine does, on all ranks of the process group at once if there is one.

    Args:
        name: of the profile.
        device: what to measure; default: the accelerator, or the CPU.
        axes: (name, ranks) of a mesh's axes, the slowest first, whose groups are measured; default: the
            ranks of a node, and one rank of each node.
        quick: fewer and shorter measurements.
        base: the profile whose numbers stand where nothing is measured.
        progress: called before each measurement.

    Raises:
        CalibrationError: a measurement failed.
        MeshError: the axes do not make up the process group.
    """
    device = device or _device()
    world = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    watch = Stopwatch(device, *((0.01, 3) if quick else (0.04, 2)), world=world)
    nodes, mesh = _nodes(), _mesh(device, axes) if world else None
    probes = list(of_compute(device, quick=quick))
    probes += list(_of_steps(device, mesh))
    for group in _groups(mesh) if mesh is not None else ():
        probes += list(_collectives(group, device, quick=quick))
    measured = _measured(probes, watch, 1 if quick else _PASSES, progress)
    start = base or load_hardware(_base_name(device))
    per_node = max(nodes.values())
    start = replace(
        start,
        synchronous=device.type == "cpu",
        memory_bytes=_memory_bytes(device, per_node),
        ranks_per_node=max(per_node, start.ranks_per_node) if len(nodes) == 1 else per_node,
    )
    found = calibrated(start, measured)
    source = _source(device, nodes, found.assumed)
    return replace(found, hardware=replace(found.hardware, name=name, source=source))


def _measured(
    probes: Sequence[Probe], watch: Stopwatch, passes: int, progress: Progress | None
) -> list[Measured]:
    """The median of several passes: what disturbs a part of one is in no other."""
    found: list[list[Measured]] = [[] for _ in probes]
    for number in range(passes * len(probes)):
        index = number % len(probes)
        if progress:
            what = probes[index].what
            progress(f"{what.group}: {what.label}", number, passes * len(probes))
        found[index].append(_timed(probes[index], watch))
    return [sorted(times, key=lambda m: m.seconds)[len(times) // 2] for times in found]


def _timed(probe: Probe, watch: Stopwatch) -> Measured:
    try:
        return timed(probe, _seconds(probe, watch))
    except RuntimeError as error:
        raise CalibrationError(
            f"Measuring {probe.what.group} ({probe.what.label}) failed: {error}".rstrip("."),
            fix="Nothing was written. See whether the backend has this operation on this device.",
        ) from error


def _seconds(probe: Probe, watch: Stopwatch) -> float:
    """What a probe takes; a difference that noise has made nothing of is measured again."""
    run = probe.make()
    if probe.without is None:
        return watch.seconds(run)
    without, seconds = probe.without(), 0.0
    for _ in range(_TRIES):
        seconds = watch.seconds(run) - watch.seconds(without)
        if seconds > 0:
            break
    return seconds


# --- where -----------------------------------------------------------------------------------------


def _device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    if found is None or (dist.is_initialized() and dist.get_backend() == "gloo"):
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


def _nodes() -> dict[str, int]:
    """The hosts of the process group, with the ranks on each."""
    hosts: list[str] = [socket.gethostname()]
    if dist.is_available() and dist.is_initialized():
        hosts = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
    return {host: hosts.count(host) for host in dict.fromkeys(hosts)}


def _mesh(device: torch.device, axes: Sequence[tuple[str, int]]) -> DeviceMesh:
    world, nodes = dist.get_world_size(), _nodes()
    if not axes:
        even = len(set(nodes.values())) == 1
        axes = [("node", len(nodes)), ("rank", world // len(nodes))] if even else [("rank", world)]
    sizes = [ranks for _, ranks in axes]
    product = 1
    for ranks in sizes:
        product *= ranks
    if product != world or min(sizes) < 1:
        asked = ",".join(f"{axis}={ranks}" for axis, ranks in axes)
        raise MeshError(
            f"The axes {asked} make up {product} ranks, and {world} are running.",
            fix="Start as many ranks as the axes have together.",
        )
    return init_device_mesh(device.type, tuple(sizes), mesh_dim_names=tuple(a for a, _ in axes))


def _groups(mesh: DeviceMesh) -> Iterator[Group]:
    sizes, names = tuple(mesh.shape), mesh.mesh_dim_names or ()
    stride = dist.get_world_size()
    for index, (ranks, axis) in enumerate(zip(sizes, names, strict=True)):
        stride //= ranks
        if ranks > 1:
            yield Group(axis, ranks, stride, mesh.get_group(index).group_name)


def _base_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu-gloo"
    name = torch.cuda.get_device_name(device).upper() if device.type == "cuda" else ""
    return next((base for part, base in _NAMES.items() if part in name), "h100-sxm")


def _memory_bytes(device: torch.device, ranks: int) -> int:
    """Of one rank; ranks share a host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _source(device: torch.device, nodes: dict[str, int], assumed: tuple[str, ...]) -> str:
    ranks = "+".join(map(str, nodes.values()))
    backend = dist.get_backend() if dist.is_available() and dist.is_initialized() else "no group"
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    threads = f", {torch.get_num_threads()} threads a rank" if device.type == "cpu" else ""
    return " ".join(
        [
            f"Measured by autoshard calibrate {__version__} on {time.strftime('%Y-%m-%d')}:",
            f"{ranks} ranks on {len(nodes)} node(s), {chip}, {os.cpu_count()} CPU cores a node{threads},",
            f"torch {torch.__version__}, backend {backend}.",
            *assumed,
        ]
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# --- what takes a process group --------------------------------------------------------------------


def _of_steps(device: torch.device, mesh: DeviceMesh | None) -> Iterator[Probe]:
    if mesh is None:
        yield from of_steps(
            lambda n, size: [nn.Parameter(torch.ones(size, device=device)) for _ in range(n)],
            lambda p: p,
        )
        return

    def parameters(count: int, size: int) -> list[nn.Parameter]:
        where = [Replicate()] * mesh.ndim
        return [
            nn.Parameter(DTensor.from_local(torch.ones(size, device=device), mesh, where))
            for _ in range(count)
        ]

    group = next(_groups(mesh)).name
    yield from of_steps(parameters, local_of)
    yield from of_conversions(lambda x: operator("replicate_to_invariant")(x, group), device)


def _collectives(group: Group, device: torch.device, *, quick: bool) -> Iterator[Probe]:
    """Each kind over sizes, after a product; every group of the axis at once, as in a step.

    In a step, ranks come from computing: not at the same moment, and to a library that has gone to sleep.
    """
    exponents = range(12, 25, 2) if device.type == "cpu" else range(16, 29, 2)
    side = 512 if device.type == "cpu" else 4096

    def product() -> Callable[[], Tensor]:
        x = torch.rand(side, side, device=device)
        return lambda: x @ x

    for kind in KINDS:
        for exponent in list(exponents)[:: 3 if quick else 1]:
            rows = -(-(2**exponent) // (64 * group.ranks**2)) * group.ranks**2
            whole = 64 * rows  # bytes: rows of 16 float32
            label = f"{size_text(whole)} on {group.axis}={group.ranks}"

            def make(kind=kind, rows=rows) -> Callable[[], object]:
                compute, talk = product(), _collective(kind, rows, group, device)
                return lambda: (compute(), talk())

            found = of(
                kind, label, make, bytes=float(whole), ranks=group.ranks, stride=group.stride
            )
            yield replace(found, without=product)


def _collective(kind: str, rows: int, group: Group, device: torch.device) -> Callable[[], Tensor]:
    """A collective of a whole tensor of `rows` rows, as conversions run it, without their copies."""
    n, name = group.ranks, group.name
    whole = torch.ones(rows, 16, device=device)
    part, cut = whole[: rows // n].clone(), (0, 1, rows)
    if kind == "all_reduce":
        return lambda: collectives.all_reduce(whole, "sum", name)
    if kind == "all_gather":
        return lambda: collectives.all_gather(part, cut, n, name)
    if kind == "reduce_scatter":
        return lambda: collectives.reduce_scatter(whole, cut, 0, n, name)
    c10d, cuts = functional_collectives(), [rows // n // n] * n
    return lambda: c10d.wait_tensor(c10d.all_to_all_single(part, cuts, cuts, name))
