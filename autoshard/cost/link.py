"""Links: what connects the ranks of a group, in the α–β model; and the checks that profiles share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeGuard

from autoshard.errors import OptionsError

if TYPE_CHECKING:
    from autoshard.cost.hardware import Hardware

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
        kind_launches_s: the fixed time of those kinds for which it is not `launch_s`.
        measured: whether the numbers are fitted to a library's collectives. Its choice of algorithms is in
            them: the first is priced, and not the cheapest.
    """

    name: str
    latency_s: float
    bandwidth_bytes_s: float
    launch_s: float
    in_switch_reduction: bool = False
    in_switch_efficiency: float = 0.85
    topology: str = "switch"
    kind_bandwidths_bytes_s: tuple[tuple[str, float], ...] = ()
    kind_launches_s: tuple[tuple[str, float], ...] = ()
    measured: bool = False

    def __post_init__(self) -> None:
        check(self, f"link '{self.name}'")
        if self.topology not in TOPOLOGIES:
            raise OptionsError(
                f"'topology' is {self.topology!r}.",
                f"link '{self.name}'",
                f"Use one of {quoted(TOPOLOGIES)}.",
            )
        for field in ("kind_bandwidths_bytes_s", "kind_launches_s"):
            for kind, _ in getattr(self, field):
                if kind not in KINDS:
                    raise OptionsError(
                        f"'{field}' has the unknown kind '{kind}'.",
                        f"link '{self.name}'",
                        f"Use {quoted(KINDS)}.",
                    )

    def bandwidth(self, kind: str) -> float:
        """1/β for collectives of `kind`, in bytes a second."""
        return dict(self.kind_bandwidths_bytes_s).get(kind, self.bandwidth_bytes_s)

    def launch(self, kind: str) -> float:
        """Fixed time of one collective of `kind`, in seconds."""
        return dict(self.kind_launches_s).get(kind, self.launch_s)


def scaled(link: Link, share: float) -> Link:
    """`link` with a part of its bandwidth."""
    kinds = tuple((kind, rate * share) for kind, rate in link.kind_bandwidths_bytes_s)
    rate = link.bandwidth_bytes_s * share
    return replace(link, bandwidth_bytes_s=rate, kind_bandwidths_bytes_s=kinds)


def check(profile: Hardware | Link, where: str) -> None:
    """Refuse numbers that no hardware has: the name of a field says its range.

    A rate may be infinite (profile `ideal`), a time may be 0.
    """
    for spec in fields(profile):
        value = getattr(profile, spec.name)
        pairs = value if isinstance(value, tuple) else ((spec.name, value),)
        for name, number in pairs:
            if not is_number(number):
                continue
            rate = spec.name.endswith(("_bytes_s", "_flops"))
            if spec.name.endswith(("_efficiency", "efficiencies")):
                good, fix = 0 < number <= 1, "It is above 0, at most 1."
            elif spec.name.endswith("_slack"):
                good, fix = 0 <= number < 1, "It is a fraction, below 1."
            elif rate:
                good, fix = number > 0, "A rate is above 0."
            elif spec.name.endswith("_s"):
                good, fix = 0 <= number < math.inf, "A time is at least 0, and finite."
            else:
                good, fix = 1 <= number < math.inf, "It is at least 1."
            if not good:
                raise OptionsError(f"'{name}' is {number}.", where, fix)


def is_number(item: object) -> TypeGuard[int | float]:
    """Whether a value of a file is a number, and no truth value."""
    return isinstance(item, int | float) and not isinstance(item, bool)


def quoted(names: Iterable[str], joint: str = ", ") -> str:
    """Names in quotes, joined."""
    return joint.join(f"'{name}'" for name in names)
