"""Hardware as data: what a machine can do, and where each number is from.

A profile is one TOML (or JSON) file whose keys are the fields of `Hardware` and `Link`; those that
autoshard ships are in `profiles/`, and a user's own file is read by the same function. Rates are
what one rank gets. A profile holds achievable numbers, not only datasheet ones: an efficiency says
which part of a peak real programs see.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from autoshard.errors import OptionsError

TOPOLOGIES = ("switch", "mesh", "ring")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Link:
    """What connects the ranks of one group, in the α–β model: a step of b bytes takes α + β·b.

    Attributes:
        name: what the report calls it: "NVLink 4 with NVSwitch".
        latency_s: α, the time of one message step beside its bytes.
        bandwidth_bytes_s: 1/β, what one rank can send (and, at the same time, receive) a second.
        launch_s: fixed time of one collective: its kernel's launch and the library's protocol.
        in_switch_reduction: whether the switch adds and multicasts (NVLink SHARP).
        in_switch_efficiency: the part of the bandwidth that such an all-reduce reaches.
        topology: "switch": every pair at full rate; "mesh": a wire to each other rank of the node,
            so that a smaller group has fewer wires; "ring": neighbours only, both ways round.
        kind_bandwidths_bytes_s: 1/β of those kinds of collectives that a library runs at another
            rate than `bandwidth_bytes_s`, as pairs ("all_gather", bytes a second).
    """

    name: str
    latency_s: float
    bandwidth_bytes_s: float
    launch_s: float
    in_switch_reduction: bool = False
    in_switch_efficiency: float = 0.85
    topology: str = "switch"
    kind_bandwidths_bytes_s: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        _check(self, f"link '{self.name}'")
        if self.topology not in TOPOLOGIES:
            raise OptionsError(
                f"'topology' is {self.topology!r}.",
                f"link '{self.name}'",
                f"Use one of {_quoted(TOPOLOGIES)}.",
            )
        for kind, _ in self.kind_bandwidths_bytes_s:
            if kind not in KINDS:
                raise OptionsError(
                    f"'kind_bandwidths_bytes_s' has the unknown kind '{kind}'.",
                    f"link '{self.name}'",
                    f"Use {_quoted(KINDS)}.",
                )

    def bandwidth(self, kind: str) -> float:
        """1/β for collectives of `kind`, in bytes a second."""
        for name, rate in self.kind_bandwidths_bytes_s:
            if name == kind:
                return rate
        return self.bandwidth_bytes_s


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

    def __post_init__(self) -> None:
        _check(self, f"hardware '{self.name}'")
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
        return self.intra if share == 1.0 else _scaled(self.intra, share)

    def to_dict(self) -> dict[str, Any]:
        """The profile as a file holds it: `hardware_from_dict` reads it back."""
        data = asdict(self)
        data["peak_flops"] = dict(self.peak_flops)
        for side in ("intra", "inter"):
            data[side]["kind_bandwidths_bytes_s"] = dict(data[side]["kind_bandwidths_bytes_s"])
        if self.copy_bandwidth_bytes_s is None:
            del data["copy_bandwidth_bytes_s"]
        return data


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
        fix=f"{_nearest(text, hardware_names())} The profiles are {_quoted(hardware_names())}; "
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
            f"Give a TOML or JSON file, or one of {_quoted(hardware_names())}.",
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
            fix = f"{_nearest(str(key), known)} The keys are {_quoted(known)}."
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
        bad = next((k for k, v in item.items() if not _is_number(v)), None)
        if bad is None:
            return tuple((str(k), float(v)) for k, v in item.items())
        raise OptionsError(f"'{key}.{bad}' is {item[bad]!r}.", where, "Expected a number.")
    if spec.type in ("float", "float | None") and _is_number(item):
        return float(item)
    if spec.type == "int" and _is_number(item) and float(item).is_integer():
        return int(item)
    if (spec.type == "bool" and isinstance(item, bool)) or (
        spec.type == "str" and isinstance(item, str)
    ):
        return item
    raise OptionsError(f"'{key}' is {item!r}.", where, f"Expected {_expected(spec)}.")


def _is_number(item: object) -> TypeGuard[int | float]:
    return isinstance(item, int | float) and not isinstance(item, bool)


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


def _check(profile: Hardware | Link, where: str) -> None:
    """Refuse numbers that no hardware has: the name of a field says its range.

    A rate may be infinite (profile `ideal`), a time may be 0.
    """
    for spec in fields(profile):
        value = getattr(profile, spec.name)
        pairs = value if isinstance(value, tuple) else ((spec.name, value),)
        for name, number in pairs:
            if not _is_number(number):
                continue
            rate = spec.name.endswith("_bytes_s") or spec.name == "peak_flops"
            if spec.name.endswith("_efficiency"):
                good, fix = 0 < number <= 1, "It is above 0, at most 1."
            elif rate:
                good, fix = number > 0, "A rate is above 0."
            elif spec.name.endswith("_s"):
                good, fix = 0 <= number < math.inf, "A time is at least 0, and finite."
            else:
                good, fix = 1 <= number < math.inf, "It is at least 1."
            if not good:
                raise OptionsError(f"'{name}' is {number}.", where, fix)


def _scaled(link: Link, share: float) -> Link:
    """`link` with a part of its bandwidth."""
    kinds = tuple((kind, rate * share) for kind, rate in link.kind_bandwidths_bytes_s)
    rate = link.bandwidth_bytes_s * share
    return replace(link, bandwidth_bytes_s=rate, kind_bandwidths_bytes_s=kinds)


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 3, 0.5)
    return f"Did you mean {_quoted(near, ' or ')}?" if near else "No name is near it."


def _quoted(names: Iterable[str], joint: str = ", ") -> str:
    return joint.join(f"'{name}'" for name in names)
