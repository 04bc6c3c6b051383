"""What `autoshard calibrate` times: small programs of which each shows one number of a profile.

They run as a training step runs them: chains forward and backward, whose results are new memory that is
held until backward. The same kernel over and over on the same tensors finds them in a cache, and may be
several times quicker.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.cost.calibration import Measured
from autoshard.cost.eager import ALONG, POINTWISE, Pass

Run = Callable[[], object]
aten = torch.ops.aten


@dataclass(frozen=True)
class Probe:
    """One measurement to make.

    Attributes:
        what: its record, without the time.
        make: builds what is timed; called when its turn comes, so that memory is held only then.
        without: builds the same without what is measured, whose time is taken off.
    """

    what: Measured
    make: Callable[[], Run]
    without: Callable[[], Run] | None = None


def of(group: str, label: str, make: Callable[[], Run], **numbers: Any) -> Probe:
    """A probe of a group, with the numbers of its record."""
    return Probe(Measured(group, label, 0.0, **numbers), make)


def of_compute(device: torch.device, *, quick: bool) -> Iterator[Probe]:
    """What one rank computes; all ranks do so at once."""
    large = device.type != "cpu"
    yield from _launches(device)
    yield from _memory(device, [2**22, 2**25] if large else [2**i for i in range(18, 23)], quick)
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


def _chain(
    program: Callable[..., Tensor], first: Tensor, others: list[Tensor], wanted: list[Tensor]
) -> Run:
    """y = program(y, other) for each of `others`, and backward to `first` and to `wanted`."""
    first.requires_grad_()

    def forward() -> Tensor:
        y = first
        for other in others:
            y = program(y, other)
        return y

    gradient = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), [first, *wanted], gradient)


def _memory(device: torch.device, sizes: list[int], quick: bool) -> Iterator[Probe]:
    programs: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, int]] = {
        "y · x": (lambda y, x: y * x, 6, 2),
        "y + x": (lambda y, x: y + x, 3, 1),
        "2 · y": (lambda y, x: y * 2.0, 4, 2),
    }
    held = 2**25 if device.type == "cpu" else 2**28  # numbers: more than caches hold
    for (name, (program, passes, launches)), count in itertools.product(programs.items(), sizes):
        if quick and (name != "y · x" and count != sizes[-2]):
            continue
        depth = max(4, held // count)

        def make(program=program, count=count, depth=depth) -> Run:
            y, *others = (torch.ones(count, device=device) for _ in range(depth + 1))
            return _chain(program, y, others, [])

        label = f"{depth} of {name} of {4 * count / 2**20:g} MiB"
        moved = 4.0 * passes * count * depth
        yield of("memory", label, make, bytes=moved, count=launches * depth)


# --- products --------------------------------------------------------------------------------------

LAYERS = 6


def _products(device: torch.device, scale: int, quick: bool) -> Iterator[Probe]:
    """Linear layers, from k features to n and back to k, with both gradients of each."""
    shapes = [(512, 512, 512), (256, 1024, 1024), (512, 512, 2048), (1024, 256, 256)]
    shapes += [(128, 512, 512), (512, 384, 1024)]
    dtypes = {"float32": shapes, "bfloat16": shapes[:2], "float64": shapes[:1]}
    if device.type != "cpu":
        dtypes["float16"] = shapes[:2]
    for dtype, all_shapes in dtypes.items():
        for m, k, n in all_shapes[: 2 if quick else None]:
            m, k, n = m * scale, k * scale, n * scale
            size = getattr(torch, dtype).itemsize * (m * k + k * n + m * n)
            yield of(
                "product",
                f"{LAYERS} layers {m}×{k}×{n} {dtype}",
                _layers(device, getattr(torch, dtype), m, k, n),
                flops=3 * LAYERS * 2.0 * m * k * n,
                bytes=3.0 * LAYERS * size,
                dtype=dtype,
                count=3 * LAYERS,
            )


def _layers(device: torch.device, dtype: torch.dtype, m: int, k: int, n: int) -> Callable[[], Run]:
    def make() -> Run:
        shapes = [(m, k), *[(n, k), (k, n)] * (LAYERS // 2)]
        x, *weights = (torch.rand(shape, device=device).to(dtype) for shape in shapes)
        for weight in weights:
            weight.mul_(1 / k).requires_grad_()
        return _chain(F.linear, x, weights, weights)

    return make


# --- elementwise arithmetic ------------------------------------------------------------------------


def _vector(device: torch.device, count: int, depth: int = 32) -> Iterator[Probe]:
    """Operators whose arithmetic may take longer than their bytes; see `cost.eager`."""
    programs: dict[str, tuple[Callable[[Tensor], Tensor], Pass]] = {
        "gelu": (F.gelu, POINTWISE["gelu"]),
        "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), POINTWISE["gelu_tanh"]),
        "silu": (F.silu, POINTWISE["silu"]),
        "softmax": (lambda x: F.softmax(x, -1), ALONG["softmax"]),
        "layer_norm": (lambda x: F.layer_norm(x, (512,)), ALONG["layer_norm"]),
        "batch_norm": (
            lambda x: F.batch_norm(x.view(-1, 32, 256), None, None, training=True).view_as(x),
            ALONG["batch_norm"],
        ),
    }
    for name, (program, spec) in programs.items():

        def make(program=program) -> Run:
            x = torch.rand(count // 512, 512, device=device)
            return _chain(lambda y, _: program(y), x, [x] * depth, [])

        yield of(
            "vector",
            f"{depth} of {name} of {count:,}",
            make,
            flops=(spec.ops + spec.back_ops) * count * depth,
            bytes=4.0 * (2 + spec.more + spec.back) * count * depth,
            count=(1 + spec.kernels) * depth,
        )


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
    parameters: Callable[[int, int], list[nn.Parameter]], local: Callable[[Any], Tensor]
) -> Iterator[Probe]:
    """Steps of models that are nothing but parameters, and updates of large ones.

    Args:
        parameters: makes so many, of so many numbers each, as a sharded module holds them.
        local: the tensor that a rank computes with.
    """
    for count in (8, 32, 128):

        def make(count=count) -> Run:
            held = parameters(count, 4)
            optimizer = torch.optim.AdamW(held, lr=1e-6, fused=True)

            def run() -> None:
                torch.cat([local(p) for p in held]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            return run

        yield of("parameter", f"a step of {count} parameters", make, count=count)
    for exponent in (18, 20):
        count, size = 2**23 >> exponent, 2**exponent

        def large(count=count, size=size) -> Run:
            held = parameters(count, size)
            for parameter in held:
                parameter.grad = torch.ones_like(parameter)
            return torch.optim.AdamW(held, lr=1e-6, fused=True).step

        label = f"AdamW on {count} parameters of {size:,}"
        yield of("update", label, large, bytes=28.0 * count * size)


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
