"""Hardware as data: what a machine can do, and where each number is from.

A profile is one TOML (or JSON) file whose keys are the fields of `Hardware` and `Link`; those that
autoshard ships are in `profiles/`, and a user's own file is read by the same function. Rates are
what one rank gets. A profile holds achievable numbers, not only datasheet ones: an efficiency says
which part of a peak real programs see.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from autoshard.cost.link import KINDS, TOPOLOGIES, Link, check, is_number, quoted, scaled
from autoshard.errors import OptionsError

__all__ = [
    "KINDS",
    "TOPOLOGIES",
    "Hardware",
    "Link",
    "hardware_from_dict",
    "hardware_names",
    "load_hardware",
]

ARITHMETIC = ("attention", "convolution")
"""Kernels besides matrix products whose efficiency a profile may give."""


@dataclass(frozen=True)
class Hardware:
    """One machine: the ranks' compute and memory, and the links between them.

    Attributes:
        name: as `--hardware` takes it.
        source: where the numbers are from.
        peak_flops: peak rate by dtype, as torch prints it without "torch.": ("bfloat16", 989e12).
            "float32" is without TF32, torch's default.
        matmul_efficiency: the part of the peak that large matrix products reach.
        memory_bandwidth_bytes_s: peak of the device's memory.
        memory_efficiency: the part of it that a streaming kernel reaches.
        memory_bytes: of one rank.
        launch_s: the least time that any operator takes.
        fused_pointwise: whether chains of elementwise operators are one pass over memory (a
            compiled program) or one each (eager).
        intra, inter: the links inside a node and between nodes. `inter` is one rank's own port.
        ranks_per_node: how many ranks `intra` connects.
        copy_bandwidth_bytes_s: rate of local copies, read and written bytes together; None for the
            achievable memory bandwidth.
        synchronous: whether operators run in the thread that launches them, as on a CPU: a launch
            then adds to an operator's time, where an accelerator hides it behind the one before.
        vector_flops: rate of elementwise arithmetic, in any floating dtype; None where memory is
            always slower.
        efficiencies: the part of the peak that "attention" and "convolution" reach, where it is not
            `matmul_efficiency`.
        parameter_s: what each parameter takes in a training step beside its bytes: handing over its
            gradient, and its part of the optimizer's calls.
        conversion_s: what one conversion takes beside its collectives and copies.
        step_s: what a step takes beside its operators: the module's call, autograd's start.
        update_bandwidth_bytes_s: rate of an optimizer's update, read and written bytes together: it
            streams over memory that is there already; None for the achievable memory bandwidth.
        allocator_slack: what the allocator needs beside what is held, as a fraction of it.
    """

    name: str
    source: str
    peak_flops: tuple[tuple[str, float], ...]
    matmul_efficiency: float
    memory_bandwidth_bytes_s: float
    memory_efficiency: float
    memory_bytes: int
    launch_s: float
    fused_pointwise: bool
    intra: Link
    inter: Link
    ranks_per_node: int
    copy_bandwidth_bytes_s: float | None = None
    synchronous: bool = False
    vector_flops: float | None = None
    efficiencies: tuple[tuple[str, float], ...] = ()
    parameter_s: float = 0.0
    conversion_s: float = 0.0
    step_s: float = 0.0
    update_bandwidth_bytes_s: float | None = None
    allocator_slack: float = 0.0

    def __post_init__(self) -> None:
        check(self, f"hardware '{self.name}'")
        for name, _ in self.efficiencies:
            if name not in ARITHMETIC:
                raise OptionsError(
                    f"'efficiencies' has the unknown kind '{name}'.",
                    f"hardware '{self.name}'",
                    f"Use {quoted(ARITHMETIC)}.",
                )
        if not self.peak_flops:
            raise OptionsError(
                "'peak_flops' is empty.",
                f"hardware '{self.name}'",
                "Give at least one dtype: bfloat16 = 989e12.",
            )

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`.

        A dtype that the profile does not list is computed as a listed one (`_COMPUTED_AS`), else at
        the slowest listed rate.
        """
        listed = dict(self.peak_flops)
        for name in (dtype, *_COMPUTED_AS.get(dtype.partition("_")[0], ())):
            if name in listed:
                return listed[name]
        return min(listed.values())

    def achieved(self, dtype: str, kind: str = "product") -> float:
        """FLOP/s that kernels of a kind reach: "product", "attention", "convolution", "vector"."""
        if kind == "vector":
            return math.inf if self.vector_flops is None else self.vector_flops
        part = dict(self.efficiencies).get(kind, self.matmul_efficiency)
        return self.peak(dtype) * part

    @property
    def update_rate(self) -> float:
        """Bytes a second of an optimizer's update, reads and writes together."""
        if self.update_bandwidth_bytes_s is not None:
            return self.update_bandwidth_bytes_s
        return self.memory_bandwidth_bytes_s * self.memory_efficiency

    def link(self, ranks_in_group: int, stride: int) -> Link:
        """The link by which a group of ranks `stride` apart is priced: the slowest that it crosses.

        Groups are aligned, as those of a mesh axis are: they fill blocks of ranks·stride ranks, and
        stay inside a node where such a block does. Between nodes each rank has a port of its own,
        and rings leave a node by the ports of all m members there, so that a ring or tree has m
        times one port's bandwidth, as far as `intra` can feed it (NCCL builds its rings so). In an
        all-to-all a rank sends (n−m)/n of what it holds through its own port.
        """
        if min(ranks_in_group, stride) < 1:
            raise OptionsError(
                f"A group of {ranks_in_group} ranks, {stride} apart, is no group.",
                fix="Both are whole numbers, at least 1.",
            )
        block = ranks_in_group * stride
        if block <= self.ranks_per_node:
            return self._inside(ranks_in_group, block)
        members = max(1, ranks_in_group // -(-block // self.ranks_per_node))
        inter = self.inter
        if members == 1:
            return inter
        outside = (ranks_in_group - 1) / (ranks_in_group - members)
        rates = {
            kind: min(members * inter.bandwidth(kind), self.intra.bandwidth(kind)) for kind in KINDS
        }
        rates["all_to_all"] = inter.bandwidth("all_to_all") * outside
        return replace(
            inter,
            name=f"{inter.name}, {members} ports a node",
            bandwidth_bytes_s=min(members * inter.bandwidth_bytes_s, self.intra.bandwidth_bytes_s),
            launch_s=max(inter.launch_s, self.intra.launch_s),
            kind_bandwidths_bytes_s=tuple(rates.items()),
        )

    def _inside(self, ranks_in_group: int, block: int) -> Link:
        """`intra` as a group inside a node sees it: on wires of its own, part of them idle."""
        if self.intra.topology == "mesh" and self.ranks_per_node > 1:
            share = max(ranks_in_group - 1, 1) / (self.ranks_per_node - 1)
        elif self.intra.topology == "ring":
            # Interleaved groups share the wires; a piece of the ring is a line, one way round less.
            share = ranks_in_group / block * (1.0 if block == self.ranks_per_node else 0.5)
        else:
            share = 1.0
        return self.intra if share == 1.0 else scaled(self.intra, share)

    @cached_property
    def hash(self) -> str:
        """A hash of all that sets a price: equal for profiles that price alike, whatever their names."""
        told = {f.name: getattr(self, f.name) for f in fields(self)}
        kept = {k: v for k, v in told.items() if k not in ("name", "source")}
        return hashlib.sha256(repr(kept).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """The profile as a file holds it: `hardware_from_dict` reads it back."""
        data = asdict(self)
        for name in ("peak_flops", "efficiencies"):
            data[name] = dict(data[name])
        for side in ("intra", "inter"):
            for name in ("kind_bandwidths_bytes_s", "kind_launches_s"):
                data[side][name] = dict(data[side][name])
        return {key: value for key, value in data.items() if value is not None}


_COMPUTED_AS: Mapping[str, tuple[str, ...]] = {
    "float8": ("bfloat16", "float16", "float32"),
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float16", "float32"),
    "complex32": ("float16", "bfloat16", "float32"),
    "complex64": ("float32",),
    "complex128": ("float64",),
    "bool": ("float32",),
    **{f"{sign}int{bits}": ("float32",) for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""What stands for a dtype that a profile does not list; the part before "_" is looked up."""


def hardware_names() -> tuple[str, ...]:
    """The names of the profiles that come with autoshard, sorted."""
    files = resources.files("autoshard.cost").joinpath("profiles").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def load_hardware(hardware: str | Path | Hardware) -> Hardware:
    """The profile of that name, or in that TOML or JSON file; a `Hardware` is returned as it is.

    Raises:
        OptionsError: there is no such profile (the nearest names are given) or file, or the file is
            malformed (the key and what is expected of it are given).
    """
    if isinstance(hardware, Hardware):
        return hardware
    text = str(hardware)
    if text in hardware_names():
        return _shipped(text)
    if isinstance(hardware, Path) or Path(text).suffix in (".toml", ".json") or "/" in text:
        return _read(Path(text))
    raise OptionsError(
        f"There is no hardware profile '{text}'.",
        fix=f"{_nearest(text, hardware_names())} The profiles are {quoted(hardware_names())}; "
        "a path to a .toml or .json file works too.",
    )


def hardware_from_dict(data: Mapping[str, Any], where: str = "") -> Hardware:
    """A profile from the content of a file; `where` names it in errors.

    Raises:
        OptionsError: a key is missing, unknown, or has a value of the wrong kind.
    """
    return _parse(Hardware, data, where, "")


@functools.cache
def _shipped(name: str) -> Hardware:
    file = resources.files("autoshard.cost").joinpath("profiles", f"{name}.toml")
    return hardware_from_dict(tomllib.loads(file.read_text("utf-8")), f"profile {name}")


def _read(path: Path) -> Hardware:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(
            "The hardware profile cannot be read.",
            f"{path}: {error}",
            f"Give a TOML or JSON file, or one of {quoted(hardware_names())}.",
        ) from error
    try:
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        what = f"The hardware profile is not valid {kind}."
        raise OptionsError(what, f"{path}: {error}") from None
    return hardware_from_dict(data, str(path))


T = TypeVar("T", Hardware, Link)


def _parse(cls: type[T], data: object, where: str, prefix: str) -> T:
    """A `cls` from a table of a file; `prefix` is the table's place in it: "intra."."""
    if not isinstance(data, Mapping):
        place = f"'{prefix[:-1]}'" if prefix else "The hardware profile"
        raise OptionsError(f"{place} is {data!r}, not a table of keys and values.", where)
    known = {f.name: f for f in fields(cls)}
    for key in data:
        if key not in known:
            fix = f"{_nearest(str(key), known)} The keys are {quoted(known)}."
            raise OptionsError(f"The key '{prefix}{key}' is unknown.", where, fix)
    for key, spec in known.items():
        if key not in data and spec.default is MISSING:
            fix = f"Add {key}: {_expected(spec)}."
            raise OptionsError(f"The key '{prefix}{key}' is missing.", where, fix)
    values: dict[str, Any] = {
        key: _value(known[key], item, where, prefix) for key, item in data.items()
    }
    try:
        return cls(**values)
    except OptionsError as error:
        place = f"{where}, {error.where}" if where else error.where
        raise OptionsError(error.what, place, error.fix) from None


def _value(spec: Field[Any], item: object, where: str, prefix: str) -> object:
    """`item` as the field `spec` wants it; the fields' annotations are strings here."""
    key = f"{prefix}{spec.name}"
    if spec.type == "Link":
        return _parse(Link, item, where, f"{key}.")
    if str(spec.type).startswith("tuple") and isinstance(item, Mapping):
        bad = next((k for k, v in item.items() if not is_number(v)), None)
        if bad is None:
            return tuple((str(k), float(v)) for k, v in item.items())
        raise OptionsError(f"'{key}.{bad}' is {item[bad]!r}.", where, "Expected a number.")
    if spec.type in ("float", "float | None") and is_number(item):
        return float(item)
    if spec.type == "int" and is_number(item) and float(item).is_integer():
        return int(item)
    if (spec.type == "bool" and isinstance(item, bool)) or (
        spec.type == "str" and isinstance(item, str)
    ):
        return item
    raise OptionsError(f"'{key}' is {item!r}.", where, f"Expected {_expected(spec)}.")


def _expected(spec: Field[Any]) -> str:
    """What a field takes, in words."""
    by_type = {"Link": "a table", "str": "text", "bool": "true or false", "int": "a whole number"}
    if str(spec.type).startswith("tuple"):
        return "a table of numbers"
    if spec.name.endswith("_bytes_s"):
        return "a number of bytes a second"
    if spec.name.endswith("_s"):
        return "a number of seconds"
    if spec.name.endswith("_efficiency"):
        return "a number above 0, at most 1"
    return by_type.get(str(spec.type), "a number")


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 3, 0.5)
    return f"Did you mean {quoted(near, ' or ')}?" if near else "No name is near it."
