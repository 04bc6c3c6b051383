"""How much memory each strategy holds, and when: the integer program's memory rows.

`lifetimes` says what is held from when to when; here it gets its size, by the strategy of the operator
that makes it, or by the state that a user wants it in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cost.model import Pricer
from autoshard.fold import Folded, OpClass, ValueGroup, star
from autoshard.graph import TensorMeta
from autoshard.ilp.problem import Hold, Tensor
from autoshard.placement import Layout, Placement, R, Shard, conversion
from autoshard.planner.lifetimes import Lifetimes, footprint_of
from autoshard.planner.lowered_memory import LOWERED
from autoshard.strategies import Strategies, Strategy

States = tuple[Layout, ...]


def holds(
    lives: Lifetimes,
    strategies: Strategies,
    pricer: Pricer,
    tensors: tuple[Tensor, ...],
    states: tuple[States, ...],
) -> tuple[Hold, ...]:
    """The memory of a step.

    Args:
        lives: when what is held.
        strategies: what may be chosen.
        pricer: the mesh and the optimizer.
        tensors: as the problem has them, a group of the folded graph each.
        states: the layouts that each tensor's states stand for.
    """
    sizes = _Sizes(strategies, pricer, tensors, states)
    found = [sizes.hold(key, spans) for key, spans in lives.spans.items()]
    return tuple([hold for hold in found if hold is not None])


def moment_in_words(folded: Folded, lives: Lifetimes, moment: int) -> str:
    """A moment of a step: an operator forward or backward, or the optimizer."""
    ops = folded.graph.ops
    if moment >= 2 * lives.forward:
        return "the optimizer's step"
    backward = moment >= lives.forward
    op = ops[(2 * lives.forward - 1 - moment if backward else moment) // 2]
    where = f" of {star(op.module, folded.graph.blocks)}" if op.module else ""
    what = op.target.removeprefix("aten.").partition(".")[0]
    return f"{'backward' if backward else 'forward'}{where}, {what}"


@dataclass(frozen=True)
class _Sizes:
    strategies: Strategies
    pricer: Pricer
    tensors: tuple[Tensor, ...]
    states: tuple[States, ...]

    def hold(self, key: tuple, when: Sequence[tuple[int, int]]) -> Hold | None:
        """What is held under a key of `Lifetimes.spans`; None where it is nothing at any strategy."""
        what, index, *rest = key
        if what in _OF_TENSORS:
            kind, size = _OF_TENSORS[what]
            copies = size(self, index)
            group = self.strategies.folded.groups[index]
            stored = self.strategies.folded.classes[group.producer].op.kind == "parameter"
            kind = "gathered" if stored and kind != "transient" else kind
            uses = rest[0] if rest else tuple(range(len(group.uses)))
            unless = rest[1] if len(rest) > 1 else ()
            if not any(size for _, size in copies) or not uses:
                return None
            return Hold(kind, when, tensor=index, uses=uses, unless=unless, copies=copies)
        kind, size = _OF_NODES[what]
        cls = self.strategies.folded.classes[index]
        found = tuple([size(self, cls, s, *rest) for s in self.strategies.choices[index]])
        return Hold(kind, when, node=index, sizes=found) if any(found) else None

    # --- by the strategy of a node --------------------------------------------------------------

    def stored(self, cls: OpClass, strategy: Strategy) -> int:
        meta = cls.op.results[0]
        return self.pricer.local_bytes(meta, strategy.results[0]) if meta else 0

    def gradient_of_weight(self, cls: OpClass, strategy: Strategy) -> int:
        meta = cls.op.results[0]
        assert meta is not None
        return self.pricer.weight_bytes(meta, strategy.results[0])[1]

    def state(self, cls: OpClass, strategy: Strategy) -> int:
        meta = cls.op.results[0]
        assert meta is not None
        return self.pricer.weight_bytes(meta, strategy.results[0])[2]

    def update(self, cls: OpClass, strategy: Strategy) -> int:
        meta = cls.op.results[0]
        assert meta is not None
        return self.pricer.update_bytes(meta, strategy.results[0])

    def result(self, cls: OpClass, strategy: Strategy, which: int) -> int:
        meta = cls.op.results[which]
        return self.pricer.local_bytes(meta, strategy.results[which]) if meta else 0

    def arriving(self, cls: OpClass, strategy: Strategy, position: int) -> int:
        index = self.strategies.folded.class_of[cls.members[0]]
        meta = self.strategies.folded.operand_metas(index)[position]
        return self.pricer.local_bytes(meta, strategy.operands[position])

    def beside(self, cls: OpClass, strategy: Strategy) -> int:
        own = self._footprint(cls).kept_bytes
        more = LOWERED.get(strategy.lowering)
        return self._scaled(own, cls, strategy) + (
            self._lowered(more.kept, cls, strategy) if more else 0
        )

    def during(self, cls: OpClass, strategy: Strategy) -> int:
        more = LOWERED.get(strategy.lowering)
        own = self._footprint(cls).forward_bytes
        return self._scaled(own, cls, strategy) + (
            self._lowered(more.forward, cls, strategy) if more else 0
        )

    def during_backward(self, cls: OpClass, strategy: Strategy) -> int:
        more = LOWERED.get(strategy.lowering)
        own = self._footprint(cls).backward_bytes
        return self._scaled(own, cls, strategy) + (
            self._lowered(more.backward, cls, strategy) if more else 0
        )

    def _footprint(self, cls: OpClass):
        index = self.strategies.folded.class_of[cls.members[0]]
        known = self.strategies.folded.graph.footprints.get(cls.op.name)
        return footprint_of(cls.op, self.strategies.rules[index], known)

    def _largest(self, cls: OpClass, strategy: Strategy) -> tuple[TensorMeta | None, Layout]:
        """The largest of an operator's tensors, whole, and how it is laid out."""
        index = self.strategies.folded.class_of[cls.members[0]]
        metas = (*cls.op.results, *self.strategies.folded.operand_metas(index))
        layouts = (*strategy.results, *strategy.operands)
        pairs = [(m, lay) for m, lay in zip(metas, layouts, strict=True) if m is not None]
        return max(pairs, key=lambda pair: pair[0].numel, default=(None, ()))

    def _scaled(self, whole_bytes: int, cls: OpClass, strategy: Strategy) -> int:
        """A rank's part of what an operator on whole tensors takes: as its largest tensor is split."""
        if not whole_bytes:
            return 0
        meta, layout = self._largest(cls, strategy)
        if meta is None or not meta.numel:
            return whole_bytes
        local = self.pricer.local_numel(meta, layout)
        return -(-whole_bytes * local // meta.numel)

    def _lowered(self, tensors: float, cls: OpClass, strategy: Strategy) -> int:
        meta, layout = self._largest(cls, strategy)
        return round(tensors * self.pricer.local_bytes(meta, layout)) if meta else 0

    # --- by the states of a tensor --------------------------------------------------------------

    def as_is(self, index: int) -> Copies:
        """The tensor itself, where somebody takes it as it is made, or in a state that is the same memory."""
        tensor, states = self.tensors[index], self.states[index]
        found = []
        for have in sorted(set(tensor.haves)):
            same = frozenset(
                (have, want)
                for want in range(len(states))
                if not any(forward for forward, _ in self._acts(states[have], states[want]))
            )
            found.append((same, self._bytes(index, states[have])))
        return tuple(found)

    def gradients_as_is(self, index: int) -> Copies:
        """Its gradient, where that is not converted."""
        return self._gradients(index, converted=False)

    def copied_gradients(self, index: int) -> Copies:
        """Its gradient in the state that users want it in, where that is converted."""
        return self._gradients(index, converted=True)

    def converted_gradients(self, index: int) -> Copies:
        """Its gradient in its own state, where users want it in another."""
        return self._gradients(index, converted=True, own=True)

    def _gradients(self, index: int, *, converted: bool, own: bool = False) -> Copies:
        tensor, states = self.tensors[index], self.states[index]
        found = []
        for have in sorted(set(tensor.haves)):
            for want in range(len(states)):
                acts = self._acts(states[have], states[want])
                if any(backward for _, backward in acts) == converted:
                    size = self._bytes(index, states[have if own else want])
                    found.append((frozenset({(have, want)}), size))
        return tuple(found) if converted else _merged(found)

    def copies(self, index: int) -> Copies:
        """What conversions make."""
        tensor, states = self.tensors[index], self.states[index]
        return tuple(
            (frozenset({(have, want)}), self._bytes(index, states[want]))
            for have, want in sorted(tensor.costs_s)
            if any(forward for forward, _ in self._acts(states[have], states[want]))
        )

    def staging(self, index: int) -> Copies:
        """What collectives lay out anew, forward."""
        return self._staged(index, backward=False)

    def staging_backward(self, index: int) -> Copies:
        """The same, of gradients."""
        return self._staged(index, backward=True)

    def _staged(self, index: int, *, backward: bool) -> Copies:
        tensor, states, found = self.tensors[index], self.states[index], []
        for have, want in sorted(tensor.costs_s):
            whole = self._bytes(index, (R,) * len(states[have]))
            size = 0
            for h, w, ranks in zip(states[have], states[want], self.pricer.mesh.sizes, strict=True):
                act = conversion(h, w) if h != w else None
                if act is not None:
                    action = act.backward if backward else act.forward
                    size += _staged_bytes(action, *((w, h) if backward else (h, w)), whole, ranks)
            if size:
                found.append((frozenset({(have, want)}), size))
        return tuple(found)

    def _acts(self, have: Layout, want: Layout) -> list[tuple[str, str]]:
        """What a conversion does, forward and backward, on the axes where it does anything forward."""
        try:
            found = [conversion(h, w) for h, w in zip(have, want, strict=True)]
        except KeyError:
            return [("impossible", "")]
        return [
            (c.forward, c.backward) for c in found if c is not None and (c.forward or c.backward)
        ]

    def _bytes(self, index: int, layout: Layout) -> int:
        group: ValueGroup = self.strategies.folded.groups[index]
        meta = self.strategies.folded.classes[group.producer].op.results[group.result]
        return self.pricer.local_bytes(meta, layout) if meta else 0


def _merged(copies: list[tuple[frozenset[tuple[int, int]], int]]) -> Copies:
    """Ways that are the same memory as one: those from one state that are as large."""
    found: dict[tuple[int, int], frozenset[tuple[int, int]]] = {}
    for pairs, size in copies:
        have = min(pairs)[0]
        found[have, size] = found.get((have, size), frozenset()) | pairs
    return tuple((pairs, size) for (_, size), pairs in found.items())


def _staged_bytes(action: str, have: Placement, want: Placement, whole: int, ranks: int) -> int:
    """What a collective lays out anew on its way, beside its operand and its result."""
    cut = have if action == "all_gather" else want
    apart = isinstance(cut, Shard) and (cut.dim > 0 or cut.blocks > 1)
    if action in ("all_gather", "reduce_scatter"):
        return whole if apart else 0
    return 2 * (whole // ranks) if action == "all_to_all" else 0


Copies = tuple[tuple[frozenset[tuple[int, int]], int], ...]

_OF_NODES = {
    "weights": ("weights", _Sizes.stored),
    "buffers": ("buffers", _Sizes.stored),
    "optimizer": ("optimizer", _Sizes.state),
    "weight gradient": ("gradients", _Sizes.gradient_of_weight),
    "update": ("transient", _Sizes.update),
    "during": ("transient", _Sizes.during),
    "during backward": ("transient", _Sizes.during_backward),
    "beside": ("activations", _Sizes.beside),
    "result": ("transient", _Sizes.result),
    "kept result": ("activations", _Sizes.result),
    "gradient": ("transient", _Sizes.result),
    "arrives": ("transient", _Sizes.arriving),
}
_OF_TENSORS = {
    "as is": ("transient", _Sizes.as_is),
    "kept as is": ("activations", _Sizes.as_is),
    "copy": ("transient", _Sizes.copies),
    "kept copy": ("activations", _Sizes.copies),
    "staging": ("transient", _Sizes.staging),
    "gradient as is": ("transient", _Sizes.gradients_as_is),
    "copied gradient": ("transient", _Sizes.copied_gradients),
    "converted gradient": ("transient", _Sizes.converted_gradients),
    "staging backward": ("transient", _Sizes.staging_backward),
}
"""What a key of `Lifetimes` is counted as, and how large it is."""
