"""What communication takes: each collective as formulas in α and β, one for each algorithm.

`formulas(kind)` gives them as sympy expressions with their sources, for reports and for solving;
`collective_s` evaluates the cheapest one that a link can run. The symbols:

    n        ranks in the group
    bytes    size of the whole tensor: what each rank holds of an all-reduce, what an all-gather
             puts out, what a reduce-scatter takes in, and what the ranks together hold of an
             all-to-all
    alpha    time of one message step beside its bytes: `Link.latency_s`
    beta     seconds a byte: 1 / `Link.bandwidth(kind)`
    launch   fixed time of one collective: `Link.launch(kind)`
    eta      `Link.in_switch_efficiency`

Additions made on the way are not priced: they are hidden behind the link. Sympy is imported when
first used; a formula becomes a plain function of floats once.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoshard.cost.hardware import Hardware
from autoshard.cost.link import KINDS, Link
from autoshard.errors import OptionsError

if TYPE_CHECKING:
    from sympy import Expr

Formulas = dict[str, "tuple[Expr, str]"]

_RING = (
    "Ring reduce-scatter, then ring all-gather: P. Patarasuk, X. Yuan, Bandwidth Optimal "
    "All-reduce Algorithms for Clusters of Workstations, J. Parallel and Distributed "
    "Computing 69(2), 2009; the bus bandwidth of NVIDIA/nccl-tests, doc/PERFORMANCE.md."
)
_TWO_TREES = (
    "Pipelined double binary tree, up and down: P. Sanders, J. Speck, J. L. Träff, "
    "Two-tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan, Parallel "
    "Computing 35(12), 2009; used by NCCL since 2.4."
)
_SWITCH = (
    "A rank reads the sum of its 1/n from the switch and multicasts it, so that its link "
    "carries the switch's reads of its whole tensor and its own 1/n; two steps and two "
    "barriers. Derived here for the scheme of B. Klenk et al., An In-Network Architecture "
    "for Accelerating Shared-Memory Multiprocessor Collectives, ISCA 2020; eta is NCCL's "
    "nvlsEfficiency (NVIDIA/nccl, src/graph/tuning.cc)."
)
_BISECTION = (
    "Half of the bytes cross the middle of the ring or line, and beta is of both ways "
    "round: J. Austin et al., How to Scale Your Model, 2025, jax-ml.github.io/scaling-book."
)
_THAKUR = (
    "R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in "
    "MPICH, Int. J. High Performance Computing Applications 19(1), 2005"
)
_PAT = (
    "the 3/4 of the bandwidth is that of NCCL's logarithmic algorithm: NVIDIA/nccl, "
    "src/graph/tuning.cc, NCCL_ALGO_PAT"
)
_ON: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "switch": {
        "all_reduce": ("ring", "tree", "in_switch"),
        "all_gather": ("ring", "recursive"),
        "reduce_scatter": ("ring", "recursive"),
        "all_to_all": ("pairwise",),
    },
    "mesh": {
        "all_reduce": ("ring", "tree"),
        "all_gather": ("ring", "recursive"),
        "reduce_scatter": ("ring", "recursive"),
        "all_to_all": ("pairwise",),
    },
    "ring": {
        "all_reduce": ("ring",),
        "all_gather": ("ring",),
        "reduce_scatter": ("ring",),
        "all_to_all": ("ring",),
    },
}
"""Which algorithms run on a link, by its topology."""


def collective_s(kind: str, full_bytes: float, ranks: int, link: Link) -> float:
    """Seconds that one collective takes, by the cheapest algorithm that `link` can run.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        full_bytes: size of the whole tensor, as "bytes" above; one shard times `ranks`, for all but
            an all-reduce.
        ranks: in the group. One rank communicates nothing: 0 seconds.
        link: what the group crosses: `Hardware.link`.

    Raises:
        OptionsError: the kind is unknown, or a number is out of range.
    """
    return _cheapest(kind, full_bytes, ranks, link)[0]


@dataclass(frozen=True)
class Parts:
    """The time of one collective, in seconds, by what it scales with.

    Attributes:
        launch_s: fixed.
        latency_s: with the latency of a step, α.
        transfer_s: with the bytes, and with β, one over the bandwidth.
    """

    launch_s: float
    latency_s: float
    transfer_s: float


def collective_parts(kind: str, full_bytes: float, ranks: int, link: Link) -> tuple[Parts, ...]:
    """The time of each algorithm that `collective_s` takes the least of, taken apart.

    Every formula is linear in launch, α and bytes·β.
    """
    if ranks == 1:
        return ()
    rounds, eta = (ranks - 1).bit_length(), link.in_switch_efficiency
    alpha, beta, launch = link.latency_s, 1.0 / link.bandwidth(kind), link.launch(kind)
    found = []
    for name in algorithms(kind, link):
        seconds = _compiled(kind, name)
        found.append(
            Parts(
                seconds(ranks, rounds, 0.0, 0.0, 0.0, launch, eta),
                seconds(ranks, rounds, 0.0, alpha, 0.0, 0.0, eta),
                seconds(ranks, rounds, full_bytes, 0.0, beta, 0.0, eta),
            )
        )
    return tuple(found)


def coefficients(kind: str, full_bytes: float, ranks: int, link: Link) -> tuple[float, float]:
    """The steps and the bytes of a measured link's algorithm: what α and β are multiplied by."""
    run = _compiled(kind, _ON[link.topology][_known(kind)][0])
    rounds = (ranks - 1).bit_length()
    return (
        run(ranks, rounds, 0.0, 1.0, 0.0, 0.0, 1.0),
        run(ranks, rounds, full_bytes, 0.0, 1.0, 0.0, 1.0),
    )


def algorithm(kind: str, full_bytes: float, ranks: int, link: Link) -> str:
    """The name of the algorithm that `collective_s` prices; "none" on one rank."""
    return _cheapest(kind, full_bytes, ranks, link)[1]


def algorithms(kind: str, link: Link) -> tuple[str, ...]:
    """The algorithms that `link` can run for `kind`: keys of `formulas(kind)`."""
    names = _ON[link.topology][_known(kind)]
    if link.measured:
        return names[:1]
    return tuple(name for name in names if name != "in_switch" or link.in_switch_reduction)


def formulas(kind: str) -> Formulas:
    """The time of a collective in seconds, by algorithm: (expression, source).

    The symbols are positive: `sympy.Symbol("beta", positive=True)`, … (see this module).
    """
    return dict(_formulas(_known(kind)))


def copy_s(size_bytes: float, hardware: Hardware) -> float:
    """Seconds to copy `size_bytes` inside one rank's memory: each byte is read and written.

    Priced for slices, for pads, and for gathers and scatters of a dimension other than 0 (a shard is
    not contiguous there). Source: the roofline with no arithmetic (see `compute`), at the profile's own rate of
    copies where it has one.
    """
    if size_bytes == 0:
        return 0.0
    moving_s = 2 * size_bytes / copy_rate(hardware)
    if hardware.synchronous:
        return moving_s + hardware.launch_s
    return max(moving_s, hardware.launch_s)


def copy_rate(hardware: Hardware) -> float:
    """Bytes a second of local copies, reads and writes together."""
    if hardware.copy_bandwidth_bytes_s is not None:
        return hardware.copy_bandwidth_bytes_s
    return hardware.memory_bandwidth_bytes_s * hardware.memory_efficiency


def _cheapest(kind: str, full_bytes: float, ranks: int, link: Link) -> tuple[float, str]:
    """Time and name of the cheapest algorithm; the first in `_ON` where several tie."""
    names = algorithms(kind, link)
    if ranks < 1 or not full_bytes >= 0:
        raise OptionsError(
            f"{kind} of {full_bytes} bytes on {ranks} ranks cannot be priced.",
            fix="There is at least one rank, and no size is below 0.",
        )
    if ranks == 1:
        return 0.0, "none"
    rounds = (ranks - 1).bit_length()
    beta = 1.0 / link.bandwidth(kind)
    rest = (link.latency_s, beta, link.launch(kind), link.in_switch_efficiency)
    return min(
        ((_compiled(kind, name)(ranks, rounds, full_bytes, *rest), name) for name in names),
        key=lambda timed: timed[0],
    )


def _known(kind: str) -> str:
    if kind in KINDS:
        return kind
    near = difflib.get_close_matches(kind, KINDS, 1)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    raise OptionsError(
        f"There is no collective '{kind}'.", fix=f"{hint}The kinds are {', '.join(KINDS)}."
    )


@functools.cache
def _compiled(kind: str, name: str) -> Callable[..., float]:
    """A formula as a function of floats: (n, ⌈log₂ n⌉, bytes, alpha, beta, launch, eta).

    ⌈log₂ n⌉ is passed as a whole number, since log(n)/log(2) in floats is off for some powers of 2.
    """
    import sympy

    n, size, alpha, beta, launch, eta = _symbols()
    rounds = sympy.Symbol("rounds")
    expression = _formulas(kind)[name][0].subs(sympy.ceiling(sympy.log(n, 2)), rounds)
    return sympy.lambdify((n, rounds, size, alpha, beta, launch, eta), expression, modules="math")


def _symbols() -> tuple[Expr, ...]:
    import sympy

    return sympy.symbols("n bytes alpha beta launch eta", positive=True)


@functools.cache
def _formulas(kind: str) -> Mapping[str, tuple[Expr, str]]:
    by_kind: Mapping[str, Callable[[], Formulas]] = {
        "all_reduce": _all_reduce,
        "all_gather": lambda: _half("all-gather", "recursive doubling"),
        "reduce_scatter": lambda: _half("reduce-scatter", "recursive halving"),
        "all_to_all": _all_to_all,
    }
    return by_kind[kind]()


def _all_reduce() -> Formulas:
    import sympy

    n, size, alpha, beta, launch, eta = _symbols()
    rounds = sympy.ceiling(sympy.log(n, 2))
    return {
        "ring": (
            launch + 2 * (n - 1) * alpha + 2 * (n - 1) / n * size * beta,
            _RING,
        ),
        "tree": (
            launch + 2 * rounds * alpha + 2 * size * beta,
            _TWO_TREES,
        ),
        "in_switch": (
            launch + 4 * alpha + (n + 1) / n * size * beta / eta,
            _SWITCH,
        ),
    }


def _half(words: str, recursive: str) -> Formulas:
    """All-gather and reduce-scatter: each is half of a ring all-reduce, and the other's mirror."""
    import sympy

    n, size, alpha, beta, launch, _ = _symbols()
    moved = (n - 1) / n * size * beta
    rounds = sympy.ceiling(sympy.log(n, 2))
    return {
        "ring": (launch + (n - 1) * alpha + moved, f"Ring {words}: {_THAKUR}."),
        "recursive": (
            launch + rounds * alpha + moved * sympy.Rational(4, 3),
            f"By {recursive}: {_THAKUR}; {_PAT}.",
        ),
    }


def _all_to_all() -> Formulas:
    import sympy

    n, size, alpha, beta, launch, _ = _symbols()
    return {
        "pairwise": (
            launch + (n - 1) * alpha + (n - 1) / n * (size / n) * beta,
            f"Pairwise exchange, each rank sends (n-1)/n of its 1/n: {_THAKUR}.",
        ),
        "ring": (
            launch + sympy.floor(n / 2) * alpha + size / 4 * beta,
            _BISECTION,
        ),
    }
