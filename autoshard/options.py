"""Read what the user passed into `Options`: names into profiles, text into bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autoshard.cost.hardware import Hardware, load_hardware
from autoshard.cost.optimizer import Optimizer, read_optimizer
from autoshard.errors import MeshError, OptionsError
from autoshard.mesh import Mesh
from autoshard.planner import Options

DEFAULT_HARDWARE = "h100-sxm"
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def read_options(
    world_size: int | None,
    mesh: Any,
    hardware: Hardware | str | None,
    memory_budget: int | str | None,
    optimizer: Optimizer | str | float | None,
    mode: str,
    search: str | None,
    constraints: Mapping[str, str] | None,
    inputs: str,
    outputs: str,
    solver: str | None,
    time_limit_s: float,
    uniform: bool,
) -> Options:
    """The options that these arguments of `autoshard.plan` mean.

    Raises:
        OptionsError: one is not understood.
        MeshError: neither or both of world_size and mesh are given, or the mesh has several axes.
    """
    _one_of("mode", mode, ("train", "infer"))
    _one_of("inputs", inputs, ("invariant",))
    _one_of("outputs", outputs, ("invariant",))
    if search is not None:
        _one_of("search", search, ("tensor", "all"))
    if not isinstance(time_limit_s, (int, float)) or not time_limit_s > 0:
        raise OptionsError(f"time_limit_s is {time_limit_s!r}.", fix="Give seconds, more than 0.")
    if constraints is not None and not isinstance(constraints, Mapping):
        raise OptionsError("constraints is no mapping.", fix='Write {"*.down_proj.weight": "row"}.')
    for item in (constraints or {}).items():
        if not all(isinstance(part, str) for part in item):
            raise OptionsError(
                f"The constraint {item[0]!r}: {item[1]!r} is no text.",
                fix='Write {"*.down_proj.weight": "row"}.',
            )
    return Options(
        mesh=read_mesh(world_size, mesh),
        hardware=load_hardware(hardware if hardware is not None else DEFAULT_HARDWARE),
        mode=mode,
        search=search or ("tensor" if mesh is None else "all"),
        memory_budget_bytes=None if memory_budget is None else read_bytes(memory_budget),
        constraints=tuple((constraints or {}).items()),
        uniform=uniform,
        solver=solver,
        time_limit_s=float(time_limit_s),
        optimizer=read_optimizer(optimizer),
    )


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionsError(f"{name} is {value!r}.", fix=f"Use {' or '.join(map(repr, known))}.")


def read_mesh(world_size: int | None, mesh: Any) -> Mesh:
    """The mesh of `world_size` ranks, or the one given: a `Mesh`, a mapping, or a torch `DeviceMesh`.

    Raises:
        MeshError: neither or both are given, or more than one axis has more than one rank.
    """
    if (world_size is None) == (mesh is None):
        neither = "Neither world_size nor mesh is given."
        raise MeshError(
            neither if mesh is None else "Both world_size and mesh are given.",
            fix='Give one: world_size=8, or mesh={"tp": 8}.',
        )
    found = Mesh.of({"tp": world_size}) if world_size is not None else _mesh(mesh)
    if sum(size > 1 for size in found.sizes) > 1 or len(found.axes) > 1:
        raise MeshError(
            f"The mesh {found} has {len(found.axes)} axes; this version plans for one.",
            fix="Give one axis, and combine it with data or pipeline parallelism outside.",
        )
    return found


def _mesh(mesh: Any) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, Mapping):
        return Mesh.of(mesh)
    names, shape = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "shape", None)
    if shape is None:
        raise MeshError(f"{type(mesh).__name__} is no mesh.", fix='Write {"tp": 8}.')
    names = names or tuple(f"axis{i}" for i in range(len(shape)))
    return Mesh.of(dict(zip(names, map(int, shape), strict=True)))


def read_bytes(size: int | str) -> int:
    """Bytes from a number, or from text like "24GiB" or "80 GB".

    Raises:
        OptionsError: it is neither, or not above zero.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match and match[2].lower() in _UNITS:
            size = int(float(match[1]) * _UNITS[match[2].lower()])
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise OptionsError(
            f"{size!r} is no memory budget.", fix='Give bytes, or text like "24GiB".'
        )
    return size
