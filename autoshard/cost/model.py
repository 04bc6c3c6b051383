"""What a strategy and a conversion cost: seconds on one rank, and bytes that it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.cost.comm import collective_s, copy_s
from autoshard.cost.compute import itemsize
from autoshard.cost.eager import eager
from autoshard.cost.fusion import Traffic
from autoshard.cost.hardware import Hardware, Link
from autoshard.cost.optimizer import ADAMW, Optimizer
from autoshard.cost.work import Site, Work, fused
from autoshard.graph import Op, TensorMeta
from autoshard.mesh import Mesh, MeshAxis
from autoshard.placement import (
    COLLECTIVES,
    Layout,
    Placement,
    R,
    Shard,
    conversion,
    local_shape,
)
from autoshard.rules.rule import Rule
from autoshard.strategies import Strategy

_WHOLE_SUMS = frozenset({"aten.linear.default", "aten.addmm.default", "aten.baddbmm.default"})
"""Products whose rule, with a bias, leaves the summed dimension without a name."""


@dataclass(frozen=True)
class Step:
    """One part of a conversion: a collective, or a local copy (kind "")."""

    axis: str
    kind: str
    phase: str
    bytes: int
    time_s: float


@dataclass(frozen=True)
class Pricer:
    """Prices on one kind of hardware.

    Attributes:
        hardware: the ranks and the links between them.
        mesh: the axes.
        train: whether backward, gradients and optimizer state are paid.
        optimizer: what is kept for each weight.
    """

    hardware: Hardware
    mesh: Mesh
    train: bool
    optimizer: Optimizer = ADAMW

    def local_bytes(self, meta: TensorMeta, layout: Layout) -> int:
        """Bytes that one rank holds of a tensor."""
        return self.local_numel(meta, layout) * itemsize(meta.dtype)

    def local_numel(self, meta: TensorMeta, layout: Layout) -> int:
        """Elements that one rank holds of a tensor: the rank that holds most."""
        return math.prod(local_shape(meta.shape, layout, self.mesh.sizes))

    # --- operators ------------------------------------------------------------------------------

    def op_s(
        self,
        op: Op,
        rule: Rule | None,
        strategy: Strategy,
        operands: tuple[TensorMeta, ...],
        traffic: Traffic,
    ) -> float:
        """Seconds of an operator, forward and (when training) backward.

        Args:
            op: the operator.
            rule: its rule; None prices it by the bytes it moves.
            strategy: how it runs.
            operands: metas of its operands.
            traffic: how its tensors move.
        """
        if op.kind == "output":
            return self.hardware.step_s
        done = self.work(op, rule, strategy, operands, traffic)
        return sum([work.seconds(self.hardware) for work in done])

    def work(
        self,
        op: Op,
        rule: Rule | None,
        strategy: Strategy,
        operands: tuple[TensorMeta, ...],
        traffic: Traffic,
    ) -> tuple[Work, ...]:
        """What an operator computes and moves, kernel by kernel; arguments as `op_s` takes them.

        The collectives of a lowering are not among it.
        """
        if op.kind != "call":
            return ()
        first = next((meta for meta in op.results if meta), None)
        dtype = first.dtype if first else "float32"
        results = self._sizes(op.results, strategy.results)
        size = itemsize(dtype)
        site = Site(
            op,
            rule.family if rule else "",
            strategy.lowering,
            self._sizes(operands, strategy.operands),
            results,
            tuple([meta.grad for meta in operands]),
            results[0] // size if results else 0,
            size,
            self._flops(op, rule, operands) / self._share(op, rule, strategy, operands),
            dtype,
            self.train and any(meta is not None and meta.grad for meta in op.results),
        )
        return fused(site, traffic) if self.hardware.fused_pointwise else eager(site, traffic)

    def _sizes(
        self, metas: tuple[TensorMeta | None, ...], layouts: tuple[Layout, ...]
    ) -> tuple[int, ...]:
        return tuple(
            [
                self.local_bytes(meta, layout) if meta else 0
                for meta, layout in zip(metas, layouts, strict=True)
            ]
        )

    def _share(
        self,
        op: Op,
        rule: Rule | None,
        strategy: Strategy,
        operands: tuple[TensorMeta, ...],
    ) -> float:
        """How many ranks share the arithmetic.

        Of attention whose values are split by width, each rank makes all scores.
        """
        split = 1
        for axis, size in enumerate(self.mesh.sizes):
            layouts = (*strategy.operands, *strategy.results)
            split *= size if any(isinstance(lay[axis], Shard) for lay in layouts) else 1
        made = strategy.results[0] if strategy.results else ()
        result = op.results[0]
        if rule and rule.family == "attention" and result is not None:
            last = len(result.shape) - 1
            if any(isinstance(p, Shard) and p.dim == last for p in made):
                scores, values = operands[0].shape[-1], result.shape[-1]
                return (scores + values) / (scores + values / split)
        return split

    def _flops(self, op: Op, rule: Rule | None, operands: tuple[TensorMeta, ...]) -> float:
        """Floating-point operations of the whole operator: two a multiplication and addition."""
        result = op.results[0]
        if rule is None or result is None or rule.family not in ("contraction", "attention"):
            return 0.0
        if rule.family == "attention":
            q, k, v = operands[:3]
            return 2.0 * q.numel * k.shape[-2] + 2.0 * result.numel * v.shape[-2]
        if "conv" in op.target:
            per = result if "transpose" not in op.target else operands[0]
            return 2.0 * per.numel * math.prod(operands[1].shape[1:])
        if "grouped_mm" in op.target:  # each row meets one expert
            return 2.0 * operands[0].numel * result.shape[-1]
        if op.target in _WHOLE_SUMS and len(operands) == 3:
            return 2.0 * result.numel * operands[1 if "add" in op.target else 0].shape[-1]
        kept = {f for dims in rule.results if dims for dim in dims for f in dim}
        summed = math.prod(size for factor, size in rule.sizes if factor not in kept)
        return 2.0 * result.numel * summed

    def optimizer_s(self, meta: TensorMeta, layout: Layout) -> float:
        """Seconds that a step takes for one weight beside its operators.

        The optimizer's are bound by the bytes it moves.
        """
        if not self.train or not meta.grad:
            return 0.0
        count = self.local_numel(meta, layout)
        state = self.optimizer.kept_bytes(count, meta.dtype)
        moved = 3 * count * itemsize(meta.dtype) + 2 * state
        return moved / self.hardware.update_rate + self.hardware.parameter_s

    # --- memory ---------------------------------------------------------------------------------

    def weight_bytes(self, meta: TensorMeta, layout: Layout) -> tuple[int, int, int]:
        """Bytes of a weight, of its gradient and of its optimizer state on one rank."""
        stored = self.local_bytes(meta, layout)
        if not self.train or not meta.grad:
            return stored, 0, 0
        count = self.local_numel(meta, layout)
        gradient = self.optimizer.of_gradient_bytes(count, meta.dtype)
        return stored, gradient, self.optimizer.kept_bytes(count, meta.dtype)

    def update_bytes(self, meta: TensorMeta, layout: Layout) -> int:
        """Bytes that the optimizer needs while it updates a weight."""
        return self.optimizer.update_bytes(self.local_numel(meta, layout), meta.dtype)

    # --- conversions ----------------------------------------------------------------------------

    def conversion(self, meta: TensorMeta, have: Layout, want: Layout) -> tuple[Step, ...]:
        """The steps of a conversion: what is communicated and copied, forward and backward."""
        steps: list[Step] = []
        for index, (axis, h, w) in enumerate(zip(self.mesh.axes, have, want, strict=True)):
            found = conversion(h, w)
            if found is None:
                continue
            whole = self.local_bytes(meta, (*have[:index], R, *have[index + 1 :]))
            if self.hardware.conversion_s:
                steps.append(Step(axis.name, "", "forward", 0, self.hardware.conversion_s))
            steps += self._phase(axis, "forward", found.forward, h, w, whole)
            if self.train and meta.grad:
                steps += self._phase(axis, "backward", found.backward, w, h, whole)
        return tuple(steps)

    def _phase(
        self, axis: MeshAxis, phase: str, action: str, h: Placement, w: Placement, whole: int
    ) -> Iterator[Step]:
        """One way of a conversion, from state `h` to `w` of a tensor of `whole` bytes."""
        if action in COLLECTIVES:
            size, link = self.axis_link(axis.name)
            yield Step(axis.name, action, phase, whole, collective_s(action, whole, size, link))
        copied = _copied(action, h, w, whole, axis.size)
        if copied:
            yield Step(axis.name, "", phase, copied, copy_s(copied, self.hardware))

    def axis_link(self, name: str) -> tuple[int, Link]:
        """The number of ranks of a mesh axis, and the slowest link that its groups cross."""
        index = [axis.name for axis in self.mesh.axes].index(name)
        size, stride = self.mesh.sizes[index], math.prod(self.mesh.sizes[index + 1 :])
        return size, self.hardware.link(size, stride)


def _copied(action: str, have: Placement, want: Placement, whole: int, ranks: int) -> int:
    """Bytes that go with an action as a local copy: slices are laid out anew, and so are the ranks'
    parts wherever they are not simply one after another.
    """
    part = whole // ranks
    if action in ("all_gather", "reduce_scatter"):
        cut = have if action == "all_gather" else want
        apart = isinstance(cut, Shard) and (cut.dim > 0 or cut.blocks > 1)
        sliced = isinstance(have, Shard) and isinstance(want, Shard)
        return (whole if apart else 0) + (part if sliced else 0)
    return {"pad": whole, "divide": whole, "slice": part, "all_to_all": 2 * part}.get(action, 0)
