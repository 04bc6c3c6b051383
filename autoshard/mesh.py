"""The mesh: named axes of ranks, row-major, as torch's DeviceMesh numbers them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.errors import MeshError


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of the mesh: its name, and the number of ranks along it."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes of ranks, outermost first: rank = coordinates in row-major order."""

    axes: tuple[MeshAxis, ...]

    def __post_init__(self) -> None:
        if not self.axes:
            raise MeshError("A mesh needs at least one axis.", fix='Write {"tp": 8}.')
        for axis in self.axes:
            if not isinstance(axis.size, int) or isinstance(axis.size, bool) or axis.size < 1:
                raise MeshError(
                    f"Mesh axis '{axis.name}' has size {axis.size!r}.",
                    fix="A size is a whole number of ranks, at least 1.",
                )
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise MeshError(f"Two mesh axes have one name: {', '.join(names)}.")

    @property
    def size(self) -> int:
        """The number of ranks in all."""
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return tuple(axis.size for axis in self.axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where `rank` stands on each axis."""
        found = []
        for size in reversed(self.sizes):
            rank, coordinate = divmod(rank, size)
            found.append(coordinate)
        return tuple(reversed(found))

    def __str__(self) -> str:
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes)

    @staticmethod
    def of(axes: Mapping[str, int]) -> Mesh:
        """A mesh from `{"dp": 2, "tp": 4}`."""
        return Mesh(tuple(MeshAxis(name, size) for name, size in axes.items()))

    @staticmethod
    def parse(text: str) -> Mesh:
        """The mesh that `str` printed: "dp=2,tp=4".

        Raises:
            MeshError: `text` is not of this form.
        """
        axes = {}
        for part in text.split(","):
            name, _, size = part.partition("=")
            if not name.strip() or not size.strip().isdigit():
                raise MeshError(f"'{text}' is not a mesh.", fix="Write dp=2,tp=4.")
            if name.strip() in axes:
                raise MeshError(f"'{text}' names the axis '{name.strip()}' twice.")
            axes[name.strip()] = int(size)
        return Mesh.of(axes)
