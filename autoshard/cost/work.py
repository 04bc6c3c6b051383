"""What one operator does on one rank: kernels, each with its arithmetic and the bytes it moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cost.compute import kernel_parts
from autoshard.cost.fusion import Traffic
from autoshard.cost.hardware import Hardware
from autoshard.graph import Op


@dataclass(frozen=True)
class Work:
    """One kernel on one rank, or several of a kind.

    Attributes:
        flops: its arithmetic.
        traffic_bytes: read and written.
        dtype: that it computes in.
        kind: of arithmetic, as `Hardware.achieved` takes it.
        launches: how many kernels it is.
    """

    flops: float
    traffic_bytes: float
    dtype: str
    kind: str = "product"
    launches: int = 1

    def parts(self, hardware: Hardware) -> dict[str, float]:
        """Its seconds, by what bounds them: "arithmetic", "memory" or "launch"."""
        return kernel_parts(
            self.flops, self.traffic_bytes, self.dtype, hardware, self.kind, self.launches
        )

    def seconds(self, hardware: Hardware) -> float:
        """Its time."""
        return sum(self.parts(hardware).values())


@dataclass(frozen=True)
class Site:
    """One operator with one strategy, in the sizes that a rank holds.

    Attributes:
        op: the operator.
        family: of its rule; "" where it has none.
        lowering: the program that runs it, where it is not the operator itself.
        operands, results: bytes on one rank.
        grads: for each operand, whether it wants a gradient.
        elements: of the first result, on one rank.
        itemsize: of one of them.
        flops: of the operator on one rank, where it multiplies and sums.
        dtype: that it computes in.
        train: whether there is a backward.
    """

    op: Op
    family: str
    lowering: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    grads: tuple[bool, ...]
    elements: int
    itemsize: int
    flops: float
    dtype: str
    train: bool


def kind_of(site: Site) -> str:
    """The kind of a product's arithmetic."""
    if site.family == "attention":
        return "attention"
    return "convolution" if "conv" in site.op.target else "product"


def moved(sizes: Sequence[int], counted: Sequence[bool]) -> int:
    """The bytes of those tensors that count."""
    return sum(size for size, counts in zip(sizes, counted, strict=True) if counts)


def products(site: Site, traffic: Traffic) -> tuple[Work, ...]:
    """A product, and in backward one more for each operand that wants a gradient.

    Attention is two products forward; backward makes the scores again, and four more.
    """
    kind = kind_of(site)
    through = moved(site.operands, traffic.taken) + moved(site.results, traffic.made)
    if site.lowering.startswith("halo_"):
        through += 2 * site.operands[0]  # a slice and what it reads beside it are put together
    if site.lowering == "exchanged_products":
        through += 2 * (site.operands[0] + site.results[0])  # rows from and to other ranks
    forward = Work(site.flops, through, site.dtype, kind)
    if not site.train or not any(site.grads):
        return (forward,)
    if kind == "attention":
        return forward, Work(2.5 * site.flops, 2 * through, site.dtype, kind)
    return (forward,) * (1 + sum(site.grads))


def recut(site: Site) -> tuple[Work, ...]:
    """A view that puts slices together anew, and takes their gradients apart; others move nothing."""
    if site.lowering != "recut":
        return ()
    copied = Work(0.0, 2 * site.results[0], site.dtype)
    return (copied, copied) if site.train and any(site.grads) else (copied,)


def reduces_statistics(site: Site) -> bool:
    """Whether it waits for statistics of all ranks, and goes over its operand once more for each."""
    return site.lowering.startswith("split_") and site.family in ("reduction", "norm")


def fused(site: Site, traffic: Traffic) -> tuple[Work, ...]:
    """An operator of a compiled program: chains of elementwise operators are one pass over memory.

    Backward, an elementwise operator reads its results' gradients and what it took, and writes gradients.
    """
    if site.family == "view":
        return recut(site)
    if site.flops:
        return products(site, traffic)
    read, written = moved(site.operands, traffic.taken), moved(site.results, traffic.made)
    again = 2 * max(site.operands, default=0) if reduces_statistics(site) else 0
    forward = Work(0.0, read + written + again, site.dtype)
    if not site.train:
        return (forward,)
    back = written + (read if len(site.operands) > 1 else read // 2)
    back += moved(site.operands, site.grads) if all(traffic.taken) else 0
    return forward, Work(0.0, back + again, site.dtype)
