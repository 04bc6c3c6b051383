"""When each tensor's memory is held: from the operator that makes it to the last that needs it.

A step is a row of moments: for each operator one in which its operands are converted and one in which it
runs, then the same backward, in reverse, and one for each class of weights in the optimizer. What is held
when does not depend on how the model is split: autograd keeps the same tensors whatever their sizes are. So
lifetimes are found once, and the sizes are left to the strategies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.fold import Folded
from autoshard.graph import Footprint, Op, Ref
from autoshard.rules.rule import Rule

Key = tuple
"""What is held: a kind of hold, and the class or tensor group whose strategies say how much."""


@dataclass(frozen=True)
class Lifetimes:
    """For each thing that is held, from which moment to which, once for each that there is.

    Attributes:
        moments: of a step.
        forward: how many of them are forward.
        spans: by what is held; `planner.memory` knows the keys.
    """

    moments: int
    forward: int
    spans: dict[Key, list[tuple[int, int]]] = field(default_factory=dict)

    def hold(self, key: Key, first: int, last: int) -> None:
        """One more of `key` is held, from one moment to another, both included."""
        if first <= last:
            self.spans.setdefault(key, []).append((first, last))


def footprint_of(op: Op, rule: Rule | None, known: Footprint | None) -> Footprint:
    """What is known of an operator's memory, or a cautious guess: it keeps all that wants a gradient."""
    if known is not None:
        return known
    grad = any(meta is not None and meta.grad for meta in op.results)
    view = rule is not None and rule.family == "view" and bool(op.operands)
    return Footprint(
        (grad and not view,) * len(op.operands),
        (grad and not view,) * len(op.results),
        0,
        (0 if view else None,) * len(op.results),
        0,
        (0 if view else None,) * len(op.operands),
        0,
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """The uses of a group of tensors, as positions among them.

    Attributes:
        index: of the group.
        every, given, inside: all uses, the one that gives the tensor to the caller, and the others.
        places: of each (class, operand position) among the uses.
    """

    index: int
    every: tuple[int, ...]
    given: tuple[int, ...]
    inside: tuple[int, ...]
    places: dict[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class _Uses:
    """How one tensor is used. Operators are their positions in the graph.

    Attributes:
        group: of tensors that are used alike; None where nobody uses it.
        first, final: the first and the last operator that takes it.
        last: the last operator that takes it, or a view of it, or the output.
        keeper: the first operator that takes and keeps it, or a view of it, and whose backward is therefore
            the last to need it; None where none does.
        keepers: the uses through which it is kept, among those of the group.
        forever: whether a view of it is given to the caller.
    """

    group: _Group | None
    first: int
    final: int
    last: int
    keeper: int | None
    keepers: tuple[int, ...]
    forever: bool


class _Reader:
    """Follows tensors through a step."""

    def __init__(self, folded: Folded, rules: tuple[Rule | None, ...], train: bool) -> None:
        self.folded, self.graph, self.train = folded, folded.graph, train
        self.ops = self.graph.ops
        self.at = {op.name: i for i, op in enumerate(self.ops)}
        known = self.graph.footprints
        of_class = [
            footprint_of(cls.op, rule, known.get(cls.op.name) if cls.op.kind == "call" else None)
            for cls, rule in zip(folded.classes, rules, strict=True)
        ]
        self.footprints = {name: of_class[index] for name, index in folded.class_of.items()}
        trained = [i for i, cls in enumerate(folded.classes) if _is_trained(cls.op)]
        self.updates = {index: number for number, index in enumerate(trained)} if train else {}
        forward = 2 * len(self.ops)
        self.made = Lifetimes(2 * forward + len(trained) if train else forward, forward)
        self.step = self.made.forward * (2 if train else 1)  # moments before the optimizer's
        self.groups = self._groups()
        self.uses: dict[Ref, _Uses] = {}
        self.arrived: set[Ref] = set()  # the tensors of which a gradient has come

    def _groups(self) -> list[_Group]:
        output, found = self.folded.class_of[self.ops[-1].name], []
        for index, group in enumerate(self.folded.groups):
            every = tuple(range(len(group.uses)))
            given = tuple([i for i in every if group.uses[i][0] == output])
            inside = tuple([i for i in every if i not in given])
            places = {use: i for i, use in enumerate(group.uses)}
            found.append(_Group(index, every, given, inside, places))
        return found

    def before(self, position: int) -> int:
        """The moment in which an operator's operands are converted."""
        return 2 * position

    def runs(self, position: int) -> int:
        """The moment of an operator's forward."""
        return 2 * position + 1

    def back(self, position: int) -> int:
        """The moment of an operator's backward."""
        return 2 * self.made.forward - 2 - 2 * position

    def after(self, position: int) -> int:
        """The moment in which its operands' gradients are converted back."""
        return self.back(position) + 1

    def read(self) -> Lifetimes:
        for op in reversed(self.ops):
            for index in range(len(op.results)):
                self._follow(op, Ref(op.name, index))
        for op in self.ops:
            self._leaf(op) if op.kind != "call" else self._call(op)
        if self.train:
            self._gradients()
        return self.made

    # --- forward --------------------------------------------------------------------------------

    def _follow(self, op: Op, ref: Ref) -> None:
        """Where a result is used, and who keeps it: through views of it too, which were followed before."""
        class_of, here = self.folded.class_of, self.at[op.name]
        takers, through, last, forever = [], [], here, False
        kept = []
        for user, position in self.graph.consumers.get(ref, ()):
            at = self.at[user.name]
            last = max(last, at)
            if user.kind != "call":
                continue
            takers.append(at)
            own, keeper = self.footprints[user.name], None
            if self.train and own.keeps_operands and own.keeps_operands[position]:
                keeper = at
            for index, operand in enumerate(own.aliases):
                if operand == position:
                    view = self.uses[Ref(user.name, index)]
                    last = max(last, view.last)
                    forever |= view.forever or bool(view.group and view.group.given)
                    if self.train and own.keeps_results and own.keeps_results[index]:
                        keeper = at  # written in place, and kept
                    if view.keeper is not None:
                        keeper = view.keeper if keeper is None else min(keeper, view.keeper)
            if keeper is not None:
                through.append((class_of[user.name], position))
                kept.append(keeper)
        number = self.folded.group_of.get(ref)
        group = None if number is None else self.groups[number]
        places = group.places if group else {}
        self.uses[ref] = _Uses(
            group,
            min(takers, default=here),
            max(takers, default=here),
            last,
            min(kept, default=None),
            tuple(sorted({places[key] for key in through})),
            forever,
        )

    def _leaf(self, op: Op) -> None:
        if not op.results or op.results[0] is None:
            return
        index, whole = self.folded.class_of[op.name], (0, self.made.moments - 1)
        if op.kind == "parameter":
            self.made.hold(("weights", index), *whole)
            if index in self.updates:
                self.made.hold(("optimizer", index), *whole)
        else:
            self.made.hold(("buffers", index), *whole)
        self._copies(self.uses[Ref(op.name)])

    def _call(self, op: Op) -> None:
        own, index, at = self.footprints[op.name], self.folded.class_of[op.name], self.at[op.name]
        now = self.runs(at)
        self.made.hold(("during", index), now, now)
        if self.train and any(own.keeps_operands):
            self.made.hold(("beside", index), now, self.back(at))
        for result, meta in enumerate(op.results):
            if meta is None:
                continue
            uses = self.uses[Ref(op.name, result)]
            if own.aliases[result] is None:
                itself = bool(own.keeps_results and own.keeps_results[result])
                self._result((index, result), at, uses, itself=itself)
            self._copies(uses)

    def _result(self, what: tuple[int, int], at: int, uses: _Uses, *, itself: bool) -> None:
        """A tensor with memory of its own: to its last use, and after it where it is kept or given out.

        `itself`: whether its own operator keeps it.
        """
        begin, end = self.runs(at), self.runs(uses.last)
        itself = itself and self.train
        if uses.forever:
            end = self.step - 1
            self.made.hold(("result", *what), begin, end)
        elif uses.group is None or uses.last == at:
            self.made.hold(("result", *what), begin, end)
        else:  # what is only converted is gone when the operator runs
            self.made.hold(("result", *what), begin, self.before(uses.last))
            self.made.hold(("as is", uses.group.index, uses.group.every), end, end)
            if given := uses.group.given:
                self.made.hold(("as is", uses.group.index, given), end + 1, self.step - 1)
        if itself:
            self.made.hold(("kept result", *what), end + 1, self.back(at))
        elif uses.group and uses.keeper is not None:
            until = self.back(uses.keeper)
            self.made.hold(("kept as is", uses.group.index, uses.keepers), end + 1, until)

    def _copies(self, uses: _Uses) -> None:
        """What conversions make of a tensor: for its users, and for autograd and the caller after them."""
        group = uses.group
        if group is None:
            return
        if group.given:
            now = self.before(len(self.ops) - 1)
            self.made.hold(("staging", group.index, group.given, group.inside), now, now)
            self.made.hold(("copy", group.index, group.given, group.inside), now, now + 1)
            self.made.hold(("copy", group.index, group.given), now + 2, self.step - 1)
        if not group.inside:
            return
        first, last = self.before(uses.first), self.runs(uses.last)
        self.made.hold(("copy", group.index, group.inside), first, last)
        self.made.hold(("staging", group.index, group.inside), first, first)
        if uses.keeper is not None:
            until = self.back(uses.keeper)
            self.made.hold(("kept copy", group.index, uses.keepers), last + 1, until)

    # --- backward -------------------------------------------------------------------------------

    def _gradients(self) -> None:
        """Gradients: from the first that arrives to their tensor's own backward."""
        for ref in self._losses():
            index, at = self.folded.class_of[ref.op], self.at[ref.op]
            self.made.hold(("gradient", index, ref.index), self.made.forward, self.back(at))
            self.arrived.add(ref)
        for op in reversed(self.ops):
            if op.kind == "call" and any(meta and meta.grad for meta in op.results):
                self._backward(op)

    def _losses(self) -> list[Ref]:
        """The outputs that backward begins at: those that are numbers, or all where none is."""
        wanted = [ref for ref in self.ops[-1].operands if self._wants(ref)]
        scalars = [ref for ref in wanted if not self.graph.meta(ref).shape]
        return scalars or wanted

    def _wants(self, ref: Ref) -> bool:
        meta = self.graph.by_name[ref.op].results[ref.index]
        return meta is not None and meta.grad

    def _backward(self, op: Op) -> None:
        own, index = self.footprints[op.name], self.folded.class_of[op.name]
        now = self.back(self.at[op.name])
        self.made.hold(("during backward", index), now, now)
        for position, ref in enumerate(op.operands):
            if not self._wants(ref):
                continue
            result = own.gradient_aliases[position] if own.gradient_aliases else None
            passed = result is not None and Ref(op.name, result) in self.arrived
            if ref not in self.arrived:
                self.arrived.add(ref)
                self._first_gradient(ref, passed=passed)
            elif not passed:
                self.made.hold(("arrives", index, position), now, now)

    def _first_gradient(self, ref: Ref, *, passed: bool) -> None:
        """The gradient that a tensor's last user gives; those of others are added to it.

        Until all have arrived it is in the state in which the users take the tensor. One that is `passed`
        on is the memory of that user's own gradient, which it outlives.
        """
        made, uses = self.graph.by_name[ref.op], self.uses[ref]
        assert uses.group is not None
        group, first, done = uses.group.index, self.back(uses.final), self.after(uses.first)
        last = self.back(self.at[ref.op])
        self.made.hold(("staging backward", group), done, done)
        self.made.hold(("copied gradient", group), first + passed, done)
        if made.kind == "parameter":
            self.made.hold(("gradient as is", group), first + passed, done - 1)
            self._weight_gradient(made, done)
        elif passed:
            self.made.hold(("gradient as is", group), first + 1, last)
            self.made.hold(("converted gradient", group), done, last)
        else:
            self.made.hold(("gradient as is", group), first, done - 1)
            self.made.hold(("gradient", self.folded.class_of[ref.op], ref.index), done, last)

    def _weight_gradient(self, op: Op, now: int) -> None:
        index = self.folded.class_of[op.name]
        self.made.hold(("weight gradient", index), now, self.made.moments - 1)
        update = 2 * self.made.forward + self.updates[index]
        if ("update", index) not in self.made.spans:  # they are updated one after another
            self.made.hold(("update", index), update, update)


def _is_trained(op: Op) -> bool:
    return op.kind == "parameter" and op.results[0] is not None and op.results[0].grad


def lifetimes(folded: Folded, rules: tuple[Rule | None, ...], *, train: bool) -> Lifetimes:
    """When what is held; see the module.

    Args:
        folded: the graph.
        rules: each class's rule, or None.
        train: whether there is a backward.
    """
    return _Reader(folded, rules, train).read()
