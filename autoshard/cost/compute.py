"""What operators take: a roofline, with a floor for the launch.

An operator moves bytes and does arithmetic at the same time, so that the slower of the two sets
its time: S. Williams, A. Waterman, D. Patterson, Roofline: An Insightful Visual Performance Model
for Multicore Architectures, Communications of the ACM 52(4), 2009. No operator is quicker than its
launch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from autoshard.cost.hardware import Hardware
from autoshard.errors import OptionsError

if TYPE_CHECKING:
    from sympy import Expr

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1,
        **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
        **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
        "float4_e2m1fn_x2": 1,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
        "qint8": 1,
        "quint8": 1,
        "qint32": 4,
    }
)
"""Bytes that one element takes in memory, by dtype as torch prints it without "torch."."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype`: "bfloat16" → 2.

    Raises:
        OptionsError: there is no such dtype; the nearest names are given.
    """
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]
    near = difflib.get_close_matches(dtype, DTYPE_BYTES, 3)
    raise OptionsError(
        f"There is no dtype '{dtype}'.",
        fix=f"Did you mean {' or '.join(near)}?" if near else "Write it as torch does: bfloat16.",
    )


def roofline_s(flops: float, traffic_bytes: float, dtype: str, hardware: Hardware) -> float:
    """Seconds that one operator takes on one rank, by the products' roofline; see `kernel_parts`.

    Args:
        flops: additions and multiplications, a fused pair counted as two.
        traffic_bytes: bytes read from and written to memory.
        dtype: that it computes in.
        hardware: the rank it runs on.
    """
    if flops == 0 and traffic_bytes == 0:
        return 0.0
    return sum(kernel_parts(flops, traffic_bytes, dtype, hardware).values())


def kernel_parts(
    flops: float,
    traffic_bytes: float,
    dtype: str,
    hardware: Hardware,
    kind: str = "product",
    launches: int = 1,
) -> dict[str, float]:
    """Seconds of one kernel on one rank, or of several of a kind, by what bounds them.

    The slower of flops / achieved rate ("arithmetic") and bytes / achievable bandwidth ("memory"); an
    accelerator hides a launch behind it, and takes the launch ("launch") where that is longer. Where
    operators run in the thread that launches them, the launches come on top.

    Args:
        flops, traffic_bytes, dtype, hardware: as `roofline_s` takes them.
        kind: of arithmetic, as `Hardware.achieved` takes it.
        launches: how many kernels it is.
    """
    compute_s = flops / hardware.achieved(dtype, kind) if flops else 0.0
    memory_s = traffic_bytes / (hardware.memory_bandwidth_bytes_s * hardware.memory_efficiency)
    bound, taken = ("arithmetic", compute_s) if compute_s > memory_s else ("memory", memory_s)
    launch_s = launches * hardware.launch_s
    if hardware.synchronous:
        return {bound: taken, "launch": launch_s}
    return {bound: taken} if taken >= launch_s else {"launch": launch_s}


def roofline_formula() -> tuple[Expr, str]:
    """The roofline as a sympy expression in seconds, and its source.

    Its symbols are positive: flops, bytes, peak (achievable, FLOP/s), bandwidth (achievable,
    bytes/s), launch.
    """
    import sympy

    flops, size, peak, bandwidth, launch = sympy.symbols(
        "flops bytes peak bandwidth launch", positive=True
    )
    source = (
        "S. Williams, A. Waterman, D. Patterson, Roofline: An Insightful Visual Performance Model "
        "for Multicore Architectures, Communications of the ACM 52(4), 2009."
    )
    return sympy.Max(flops / peak, size / bandwidth, launch), source
