"""What `autoshard calibrate` times: small programs of which each shows one number of a profile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.cost.calibration import Measured
from autoshard.cost.eager import ALONG, POINTWISE

Run = Callable[[], object]
aten = torch.ops.aten


@dataclass(frozen=True)
class Probe:
    """One measurement to make.

    Attributes:
        what: its record, without the time.
        make: builds what is timed; called when its turn comes, so that memory is held only then.
    """

    what: Measured
    make: Callable[[], Run]


def of(group: str, label: str, make: Callable[[], Run], **numbers: Any) -> Probe:
    """A probe of a group, with the numbers of its record."""
    return Probe(Measured(group, label, 0.0, **numbers), make)


def of_compute(device: torch.device, *, quick: bool) -> Iterator[Probe]:
    """What one rank computes; all ranks do so at once."""
    large = device.type != "cpu"
    yield from _launches(device)
    yield from _memory(device, [2**22, 2**25] if large else [2**18, 2**19, 2**20, 2**21], quick)
    yield from _products(device, 8 if large else 1, quick)
    yield from _vector(device, 2**24 if large else 2**19)
    yield from _attention(device, 8 if large else 1, quick)
    yield from _convolution(device, 8 if large else 1, quick)


# --- launches and memory -------------------------------------------------------------------------


def _launches(device: torch.device, chain: int = 100) -> Iterator[Probe]:
    """Operators on four numbers, forward and backward."""

    def make() -> Run:
        x = torch.ones(4, device=device, requires_grad=True)
        one = torch.ones(4, device=device)

        def run() -> None:
            y = x
            for _ in range(chain):
                y = aten.mul.Tensor(y, one)
            (gradient,) = torch.autograd.grad(y, x, one)
            del gradient

        return run

    yield of("launch", f"{2 * chain} operators on 4 numbers", make, count=2 * chain)


def _memory(device: torch.device, sizes: list[int], quick: bool) -> Iterator[Probe]:
    programs: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
        "copy": (lambda x, y: x.clone(), 2),
        "add": (lambda x, y: x + y, 3),
        "scale": (lambda x, y: x * 2.0, 2),
    }
    for (name, (program, passes)), count in itertools.product(programs.items(), sizes):
        if quick and (name != "copy" and count != sizes[-2]):
            continue

        def make(program=program, count=count) -> Run:
            x, y = torch.ones(count, device=device), torch.ones(count, device=device)
            return lambda: program(x, y)

        yield of("memory", f"{name} {4 * count / 2**20:g} MiB", make, bytes=4.0 * passes * count)


# --- products --------------------------------------------------------------------------------------


def _products(device: torch.device, scale: int, quick: bool) -> Iterator[Probe]:
    """Products as a linear layer makes them: forward, and both gradients."""
    shapes = [
        (512, 512, 512),
        (256, 1024, 1024),
        (512, 512, 2048),
        (1024, 256, 256),
        (128, 512, 512),
    ]
    dtypes = {"float32": shapes, "bfloat16": shapes[:2], "float64": shapes[:1]}
    if device.type != "cpu":
        dtypes["float16"] = shapes[:2]
    for dtype, all_shapes in dtypes.items():
        for m, k, n in all_shapes[: 2 if quick else None]:
            m, k, n = m * scale, k * scale, n * scale
            for which in ("y", "dx", "dw")[: 1 if quick and dtype != "float32" else None]:
                yield of(
                    "product",
                    f"{m}×{k}×{n} {dtype} {which}",
                    _product(device, getattr(torch, dtype), m, k, n, which),
                    flops=2.0 * m * k * n,
                    bytes=float(getattr(torch, dtype).itemsize * (m * k + k * n + m * n)),
                    dtype=dtype,
                )


def _product(
    device: torch.device, dtype: torch.dtype, m: int, k: int, n: int, which: str
) -> Callable[[], Run]:
    def make() -> Run:
        x, w, g = (torch.rand(shape, device=device).to(dtype) for shape in ((m, k), (n, k), (m, n)))
        programs: dict[str, Run] = {
            "y": lambda: F.linear(x, w),
            "dx": lambda: g.mm(w),
            "dw": lambda: g.t().mm(x),
        }
        return programs[which]

    return make


# --- elementwise arithmetic ------------------------------------------------------------------------


def _vector(device: torch.device, count: int) -> Iterator[Probe]:
    """Operators whose arithmetic may take longer than their bytes; see `cost.eager`."""
    programs: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
        "gelu": (F.gelu, POINTWISE["gelu"].ops),
        "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), POINTWISE["gelu_tanh"].ops),
        "silu": (F.silu, POINTWISE["silu"].ops),
        "softmax": (lambda x: F.softmax(x, -1), ALONG["softmax"].ops),
        "layer_norm": (lambda x: F.layer_norm(x, (512,)), ALONG["layer_norm"].ops),
        "batch_norm": (
            lambda x: F.batch_norm(x.view(-1, 32, 256), None, None, training=True),
            ALONG["batch_norm"].ops,
        ),
    }
    for name, (program, ops) in programs.items():

        def make(program=program) -> Run:
            x = torch.rand(count // 512, 512, device=device)
            return lambda: program(x)

        yield of("vector", f"{name} of {count:,}", make, flops=ops * count, bytes=8.0 * count)


# --- attention and convolution ---------------------------------------------------------------------


def _both_ways(
    program: Callable[..., Tensor], *shapes: tuple[int, ...], device: torch.device
) -> Run:
    """A program forward and backward."""
    given = [torch.rand(shape, device=device, requires_grad=True) for shape in shapes]
    gradient = torch.ones_like(program(*given))
    return lambda: torch.autograd.grad(program(*given), given, gradient)


def _attention(device: torch.device, scale: int, quick: bool) -> Iterator[Probe]:
    shapes = [(4, 8, 128, 64), (8, 4, 64, 32), (2, 8, 256, 64)]
    for b, h, s, d in shapes[: 1 if quick else None]:
        b *= scale
        flops, size = 4.0 * b * h * s * s * d, 4.0 * b * h * s * d

        def make(b=b, h=h, s=s, d=d) -> Run:
            return _both_ways(F.scaled_dot_product_attention, *[(b, h, s, d)] * 3, device=device)

        label = f"{b}×{h} heads, {s} positions of {d}"
        yield of("attention", label, make, flops=3.5 * flops, bytes=12 * size, count=2)


def _convolution(device: torch.device, scale: int, quick: bool) -> Iterator[Probe]:
    shapes = [(8, 64, 16, 3), (8, 128, 8, 3), (8, 32, 32, 3), (8, 64, 16, 1)]
    for b, c, side, k in shapes[: 1 if quick else None]:
        b *= scale
        flops = 2.0 * b * c * side * side * c * k * k
        size = 4.0 * (2 * b * c * side * side + c * c * k * k)

        def make(b=b, c=c, side=side, k=k) -> Run:
            def program(x: Tensor, w: Tensor) -> Tensor:
                return F.conv2d(x, w, padding=k // 2)

            return _both_ways(program, (b, c, side, side), (c, c, k, k), device=device)

        label = f"{b}×{c} channels, {side}×{side}, kernel {k}"
        yield of("convolution", label, make, flops=3 * flops, bytes=3 * size, count=3)


# --- a step's fixed times ----------------------------------------------------------------------------


def of_steps(
    parameters: Callable[[int], list[nn.Parameter]], local: Callable[[Any], Tensor]
) -> Iterator[Probe]:
    """Steps of models that are nothing but parameters.

    Args:
        parameters: makes so many small ones, as a sharded module holds them.
        local: the tensor that a rank computes with.
    """
    for count in (8, 32, 128):

        def make(count=count) -> Run:
            held = parameters(count)
            optimizer = torch.optim.AdamW(held, lr=1e-6, fused=True)

            def run() -> None:
                torch.cat([local(p) for p in held]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            return run

        yield of("parameter", f"a step of {count} parameters", make, count=count)


def of_conversions(convert: Callable[[Tensor], Tensor], device: torch.device) -> Iterator[Probe]:
    """A chain of conversions that do next to nothing, forward and backward."""
    chain = 20

    def make() -> Run:
        x, one = torch.ones(4, device=device, requires_grad=True), torch.ones(4, device=device)

        def run() -> None:
            y = x
            for _ in range(chain):
                y = convert(y)
            torch.autograd.grad(y, x, one)

        return run

    yield of("conversion", f"{chain} conversions", make, count=chain)


def timed(probe: Probe, seconds: float) -> Measured:
    """A probe's record with its time."""
    return replace(probe.what, seconds=seconds)
