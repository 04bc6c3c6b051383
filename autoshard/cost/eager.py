"""Operators as eager execution runs them: one kernel after another, each through memory.

A price is passes over memory, in tensors read or written, and elementwise arithmetic, in additions an
element. Both are torch 2.13's, read from its CPU kernels and derivative formulas and checked against
their times (docs/calibration.md); on an accelerator elementwise arithmetic is hidden behind memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from autoshard.cost.fusion import Traffic
from autoshard.cost.work import Site, Work, products, reduces_statistics


class Pass(NamedTuple):
    """How an operator that works element by element runs.

    Attributes:
        ops: arithmetic of an element of the result, forward.
        back: passes over memory in backward, for each operand that wants a gradient.
        back_ops: arithmetic of an element in backward.
        kernels: launched in backward, for each such operand.
        more: passes over memory forward, beside reading the operands and writing the results.
    """

    ops: float = 1
    back: float = 3
    back_ops: float = 1
    kernels: int = 1
    more: float = 0


_NONE, _SCALE = Pass(1, 0, 0, 0), Pass(1, 2)
_UNKNOWN = Pass(4, 3, 4)

POINTWISE: Mapping[str, Pass] = {
    **dict.fromkeys(
        ["add", "add_", "sub", "rsub", "clone", "alias", "zeros_like", "ones_like"], _NONE
    ),
    **dict.fromkeys(
        ["neg", "to", "_to_copy", "type_as", "mul_scalar", "div_scalar", "masked_fill"], _SCALE
    ),
    **dict.fromkeys(["cat", "stack"], _NONE),
    "mul": Pass(1, 3),
    "div": Pass(1, 5, 2, 2),
    "where": Pass(1, 3),
    "relu": Pass(1, 3),
    "exp": Pass(3, 3),
    "tanh": Pass(5, 3),
    "sigmoid": Pass(6, 3),
    "silu": Pass(7, 3, 9),
    "gelu": Pass(7, 3, 14),
    "gelu_tanh": Pass(34, 3, 36),
    "pow": Pass(2, 7, 4, 3),
    "rsqrt": Pass(3, 7, 4, 3),
    "sqrt": Pass(3, 5, 4, 2),
    "dropout": Pass(110, 3, 1, 1, 3),
}
"""By operator; an elementwise one that is not listed is `_UNKNOWN`."""

ALONG: Mapping[str, Pass] = {
    "sum": Pass(1, 0, 0, 0),
    "mean": Pass(1, 3, 2),
    "softmax": Pass(9, 3, 2),
    "_softmax": Pass(9, 3, 2),
    "log_softmax": Pass(10, 4, 4),
    "_log_softmax": Pass(10, 4, 4),
    "layer_norm": Pass(7, 4, 8),
    "group_norm": Pass(7, 5, 10),
    "rms_norm": Pass(12, 20, 8, 6, 8),
    "batch_norm": Pass(25, 5, 16, 1, 1),
    "max_pool2d": Pass(600, 3, 1),
    "cross_entropy_loss": Pass(10, 5, 4, 2, 2),
    "mse_loss": Pass(2, 3),
}
"""Operators that look along a dimension: passes and arithmetic are of the operand's elements, but those of
pooling of the result's. One that is not listed is `_REDUCES`."""
_REDUCES = Pass(4, 6, 4, 3)
_VOCAB = Pass(12, 9, 8, 7, 5)
"""Cross-entropy of split classes: maximum, difference, exponential and sum are kernels of their own."""
_SPLIT = Pass(12, 12, 8, 8, 8)
"""Statistics that span ranks: sums, differences, squares and scaling are kernels of their own."""
_SEEDING = 12
"""Launches that a mask of a rank's own takes to set and restore the generator."""


def eager(site: Site, traffic: Traffic) -> tuple[Work, ...]:
    """The kernels of an operator, forward and (where there is a backward) backward."""
    if traffic.joined:
        forward, backward = [], _bias_gradient(site)
    else:
        family = site.family if site.op.target != "aten.cat.default" else "pointwise"
        forward, backward = _FAMILIES.get(family, _unruled)(site, traffic)
    if not site.train or not any(site.grads):
        return tuple(forward)
    return (*forward, *backward, *_added(site, traffic))


def _stem(site: Site) -> str:
    return site.op.target.removeprefix("aten.").partition(".")[0]


def _kernel(site: Site, passes_bytes: float, ops: float = 0.0, launches: int = 1) -> Work:
    return Work(ops, passes_bytes, site.dtype, "vector", launches)


def _added(site: Site, traffic: Traffic) -> list[Work]:
    """Gradients of a tensor that several operators take are added up, two at a time."""
    return [
        _kernel(site, 3 * size, size / site.itemsize)
        for size, grad, adds in zip(site.operands, site.grads, traffic.adds, strict=True)
        if grad and adds
    ]


def _bias_gradient(site: Site) -> list[Work]:
    return (
        [_kernel(site, site.results[0] + site.operands[1], site.elements)] if site.grads[1] else []
    )


Kernels = tuple[list[Work], list[Work]]


def _product(site: Site, traffic: Traffic) -> Kernels:
    forward, *backward = products(site, traffic)
    return [forward], backward


def _pointwise(site: Site, traffic: Traffic) -> Kernels:
    spec, result = _pointwise_spec(site), sum(site.results)
    work = _kernel(site, sum(site.operands) + result + spec.more * result, spec.ops * site.elements)
    extra = _SEEDING if site.lowering == "split_dropout" else 0
    forward = [work] + ([_kernel(site, 0.0, 0.0, extra)] if extra else [])
    backward = []
    for size, grad in zip(site.operands, site.grads, strict=True):
        if not grad:
            continue
        if spec.kernels:
            ops = spec.back_ops * site.elements
            backward.append(_kernel(site, spec.back * site.results[0], ops, spec.kernels))
        if size < site.results[0] and _stem(site) not in ("cat", "stack"):
            backward.append(_kernel(site, site.results[0] + size, site.elements))  # what broadcast
    return forward, backward


def _pointwise_spec(site: Site) -> Pass:
    stem = _stem(site)
    if stem in ("mul", "div") and len(site.operands) == 1:
        stem += "_scalar"
    if stem == "gelu" and ("approximate", "tanh") in site.op.kwargs:
        stem = "gelu_tanh"
    return POINTWISE.get(stem, _UNKNOWN)


def _along(site: Site, traffic: Traffic) -> Kernels:
    spec = _VOCAB if site.lowering == "vocab_cross_entropy" else ALONG.get(_stem(site), _REDUCES)
    spec = _SPLIT if reduces_statistics(site) else spec
    size = max(site.operands)
    elements = site.elements if "pool" in site.op.target else size / site.itemsize
    moved = sum(site.operands) + sum(site.results) + spec.more * size
    forward = [_kernel(site, moved, spec.ops * elements, 8 if spec is _SPLIT else 1)]
    backward = _kernel(site, spec.back * size, spec.back_ops * elements, spec.kernels)
    return forward, [backward]


_MASKED = ("vocab_embedding", "split_lookup", "split_gather", "exchanged_lookup")


def _gather(site: Site, traffic: Traffic) -> Kernels:
    """Rows looked up are read and written; backward a gradient of zeros is added to."""
    result, table = site.results[0], site.operands[0]
    masked = 2 * result if site.lowering in _MASKED else 0
    forward = [_kernel(site, 2 * result + masked, 0.0, 6 if masked else 1)]
    return forward, [_kernel(site, table + 3 * result + masked, site.elements, 2 if masked else 1)]


def _view(site: Site, traffic: Traffic) -> Kernels:
    """A view is a launch at most; backward, what was cut is padded and what was split is joined."""
    result, whole, stem = sum(site.results), site.operands[0] if site.operands else 0, _stem(site)
    copied = 2 * result if traffic.copies or site.lowering == "recut" else 0
    back = {
        "slice": whole + 2 * result,
        "narrow": whole + 2 * result,
        "select": whole + 2 * result,
        "expand": result + whole if result > whole else 0,
    }
    if stem in ("split", "split_with_sizes", "chunk", "unbind"):
        back[stem] = 2 * whole
    return [_kernel(site, copied)], [_kernel(site, back.get(stem, copied))]


def _unruled(site: Site, traffic: Traffic) -> Kernels:
    through = sum(site.operands) + sum(site.results)
    return [_kernel(site, through)], [_kernel(site, 2 * through)]


_FAMILIES: Mapping[str, Callable[[Site, Traffic], Kernels]] = {
    "contraction": _product,
    "attention": _product,
    "pointwise": _pointwise,
    "reduction": _along,
    "norm": _along,
    "loss": _along,
    "gather": _gather,
    "view": _view,
}
