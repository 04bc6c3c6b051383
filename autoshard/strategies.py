"""From rules to strategies: for each operator, the ways in which it may run on the mesh.

A strategy says in what state each operand is wanted and each result is left. All of them follow from
the operator's rule; the blocks in which a dimension may be cut are learnt from the whole graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.cuts import (
    Cut,
    Dimensions,
    Results,
    Rules,
    possible_cuts,
    reaches,
    splits,
    statistics,
)
from autoshard.fold import Folded
from autoshard.graph import TensorMeta
from autoshard.mesh import Mesh
from autoshard.placement import I, Layout, P, Placement, R, Shard, format_layout
from autoshard.rules.registry import DEFAULT, Registry
from autoshard.rules.rule import Call, Inner, Rule

SEARCHES = ("tensor", "all", "megatron", "batch")
"""What may be split: weights' dimensions, all, weights' without reducing statistics, or the batch."""


@dataclass(frozen=True)
class Strategy:
    """One way to run an operator.

    Attributes:
        operands: the layout in which each operand is wanted.
        results: the layout of each result.
        lowering: the program that runs it, where it is not the operator itself.
        factor: the factor that is split, for reasons and prices; "" where none is.
        inner: the collectives that the lowering runs.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    lowering: str = ""
    factor: str = field(default="", compare=False)
    inner: tuple[Inner, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        given = " ".join(map(format_layout, self.operands))
        made = " ".join(map(format_layout, self.results))
        lowered = f" [{self.lowering}]" if self.lowering else ""
        return f"{given} -> {made}{lowered}".strip()


@dataclass(frozen=True)
class Strategies:
    """What may be chosen, for each class of a folded graph.

    Attributes:
        folded: the graph.
        mesh: where it is to run.
        rules: each class's rule; None where it has none.
        choices: each class's strategies; the first runs everything whole.
        fixed: for each (class, result), whether it must be used as it is stored: a weight, or a view
            of one, under `search="tensor"`; it may then still become Replicate.
        locked: (class, operand) pairs that an operator writes to and nothing may convert.
    """

    folded: Folded
    mesh: Mesh
    rules: tuple[Rule | None, ...]
    choices: tuple[tuple[Strategy, ...], ...]
    fixed: frozenset[tuple[int, int]]
    locked: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class _Space:
    """What is known before strategies are listed: n ranks, rules, cuts, and which cuts are allowed.

    `gathers`: whether a weight may be stored split in any way, and gathered for use.
    """

    folded: Folded
    rules: tuple[Rule | None, ...]
    n: int
    cuts: dict[tuple[int, str], frozenset[int]]
    allowed: frozenset[tuple[int, str, int]] | None
    partial: frozenset[tuple[int, int]]
    locked: frozenset[tuple[int, int]]
    gathers: bool

    def blocks(self, index: int, factor: str) -> list[int]:
        """The numbers of blocks in which a factor of a class may be cut."""
        return [
            k
            for k in sorted(self.cuts.get((index, factor), ()))
            if self.allowed is None or (index, factor, k) in self.allowed
        ]


def find_rules(folded: Folded, registry: Registry = DEFAULT) -> tuple[Rule | None, ...]:
    """The rule of each class's operator, or None where there is none."""
    return tuple(_rule(folded, i, registry) for i in range(len(folded.classes)))


def derive(
    folded: Folded,
    mesh: Mesh,
    *,
    search: str = "all",
    rules: tuple[Rule | None, ...] | None = None,
) -> Strategies:
    """List the strategies of every class.

    Args:
        folded: the graph.
        mesh: one axis; its size is n.
        search: one of `SEARCHES`: "tensor" leaves out splits of dimensions that are no weight's.
        rules: of each class, where they are known already.
    """
    n = mesh.size
    rules = find_rules(folded) if rules is None else rules
    locked, weights = _locked(folded, rules), _weights(folded, rules)
    cuts = possible_cuts(folded, rules, n)
    allowed = _allowed(search, Dimensions(folded, rules, cuts), rules, weights)
    partial, fixed = _may_be_partial(folded, rules, n), search in ("tensor", "megatron")
    space = _Space(folded, rules, n, cuts, allowed, partial, locked, not fixed)
    choices = tuple(tuple(dict.fromkeys(_of_class(space, i))) for i in range(len(folded.classes)))
    if any(rule and rule.noise for rule in rules):
        choices = tuple(options[:1] for options in choices)
    return Strategies(folded, mesh, rules, choices, weights if fixed else frozenset(), locked)


def _allowed(
    search: str, dimensions: Dimensions, rules: Rules, weights: Results
) -> frozenset[Cut] | None:
    """The cuts that a search may use; None for all."""
    if search == "all":
        return None
    if search == "batch":
        return dimensions.of_batch()
    found = dimensions.of_weights(weights)
    return found - statistics(rules, found) if search == "megatron" else found


def _rule(folded: Folded, index: int, registry: Registry) -> Rule | None:
    op = folded.classes[index].op
    return registry.rule(Call.of(op, folded.graph)) if op.kind == "call" else None


def _locked(folded: Folded, rules: tuple[Rule | None, ...]) -> frozenset[tuple[int, int]]:
    found = set()
    for index, (cls, rule) in enumerate(zip(folded.classes, rules, strict=True)):
        found |= {(index, position) for position in cls.op.pinned}
        found |= {(index, position) for position in (rule.locked if rule else ())}
    return frozenset(found)


def _weights(folded: Folded, rules: tuple[Rule | None, ...]) -> frozenset[tuple[int, int]]:
    """The results that are weights, or views and casts of one: no copies over a batch."""
    found = {(i, 0) for i, cls in enumerate(folded.classes) if cls.op.kind == "parameter"}
    for index, (cls, rule) in enumerate(zip(folded.classes, rules, strict=True)):
        single = len(cls.op.operands) == 1 and rule is not None and bool(rule.linear)
        if (
            single
            and not _grows(folded, index)
            and all(s in found for s in folded.sources.get((index, 0), ((-1, 0),)))
        ):
            found |= {(index, result) for result in range(len(cls.op.results))}
    return frozenset(found)


def _grows(folded: Folded, index: int) -> bool:
    """Whether an operator makes copies: its result has more elements than its operand."""
    (given,), made = folded.operand_metas(index), folded.classes[index].op.results
    return any(meta is not None and meta.numel > given.numel for meta in made)


# --- the strategies of one class ----------------------------------------------------------------


def _may_be_partial(
    folded: Folded, rules: tuple[Rule | None, ...], n: int
) -> frozenset[tuple[int, int]]:
    """The results that may be shares: made by a sum over a split factor, or linearly from shares."""
    found: set[tuple[int, int]] = set()
    changed = n > 1
    while changed:
        before = len(found)
        for index, rule in enumerate(rules):
            if rule and (_sums(rule, n) or _takes_shares(folded, index, rule, found)):
                found |= {(index, result) for result in range(len(rule.results))}
        changed = len(found) > before
    return frozenset(found)


def _sums(rule: Rule, n: int) -> bool:
    """Whether some factor is summed over, and may be split."""
    return any(
        splits(rule, factor, 1, n) and not any(place[0] for place in rule.places[factor])
        for factor, _ in rule.sizes
        if not any(special.factor == factor and special.results for special in rule.specials)
    ) or any(special.lowering.startswith("mean") for special in rule.specials)


def _takes_shares(folded: Folded, index: int, rule: Rule, partial: set[tuple[int, int]]) -> bool:
    return any(
        all(any(m in partial for m in folded.sources.get((index, pos), ())) for pos in group)
        for group in rule.linear
    )


def _of_class(space: _Space, index: int) -> list[Strategy]:
    op = space.folded.classes[index].op
    if op.kind == "output":
        return [Strategy(tuple((I,) for _ in op.operands), ())]
    return _call(space, index) if op.kind == "call" else _leaf(space, index)


def _leaf(space: _Space, index: int) -> list[Strategy]:
    """A leaf is Invariant. A weight, and a buffer that an operator writes to, may be stored split."""
    op = space.folded.classes[index].op
    uses = [use for group in space.folded.groups if group.producer == index for use in group.uses]
    may_split = op.kind == "parameter" or any(use in space.locked for use in uses)
    found = [Strategy((), ((I,),))]
    if space.n == 1 or not may_split or op.kind in ("input", "constant"):
        return found
    shards = {shard for use in uses for shard in _wanted_cuts(space, *use)}
    meta = op.results[0]
    if meta is not None and op.kind == "parameter" and (space.gathers or not uses):
        shards |= {Shard(dim) for dim, size in enumerate(meta.shape) if reaches(size, space.n)}
    ordered = sorted(shards, key=lambda shard: (shard.blocks, shard.dim))
    return found + [Strategy((), ((shard,),), factor=str(shard)) for shard in ordered]


def _wanted_cuts(space: _Space, index: int, position: int) -> list[Shard]:
    """The ways in which a class may want one of its operands cut."""
    rule = space.rules[index]
    if rule is None or space.folded.classes[index].op.pinned:
        return []
    return [
        Shard(dim, outer * k)
        for factor, _ in rule.sizes
        for is_result, which, dim, outer in rule.places[factor]
        if not is_result and which == position
        for k in space.blocks(index, factor)
    ]


def _call(space: _Space, index: int) -> list[Strategy]:
    op, metas = space.folded.classes[index].op, space.folded.operand_metas(index)
    rule, sources = space.rules[index], space.folded.sources
    found = [Strategy(_same(metas, I), _same(op.results, I))]
    if space.n == 1 or not op.operands or op.pinned:
        return found
    if any(meta.grad for meta in metas):
        found.append(Strategy(_same(metas, R), _same(op.results, R)))
    if rule is None:
        return found
    found += [
        _split(rule, factor, k, space.n, metas, op.results)
        for factor, _ in rule.sizes
        for k in space.blocks(index, factor)
    ]
    for group in rule.linear:
        if all(any(m in space.partial for m in sources.get((index, p), ())) for p in group):
            states = [P if i in group else _state(R, meta) for i, meta in enumerate(metas)]
            wants = tuple((state,) for state in states)
            found.append(Strategy(wants, tuple((P,) for _ in op.results), factor="share"))
    return found


def _state(state: Placement, meta: TensorMeta | None) -> Placement:
    """`state`, where Replicate and Invariant are one for a tensor without a gradient."""
    return I if state == R and not (meta and meta.grad) else state


def _same(metas: tuple[TensorMeta | None, ...], state: Placement) -> tuple[Layout, ...]:
    return tuple((_state(state, meta),) for meta in metas)


def _split(
    rule: Rule,
    factor: str,
    blocks: int,
    n: int,
    metas: tuple[TensorMeta, ...],
    results: tuple[TensorMeta | None, ...],
) -> Strategy:
    """The strategy that cuts `factor` in `blocks` blocks."""
    wants: list[Placement] = [_state(R, meta) for meta in metas]
    made: list[Placement] = [P for _ in results]
    for is_result, which, dim, outer in rule.places[factor]:
        (made if is_result else wants)[which] = Shard(dim, outer * blocks)
    special = next((s for s in rule.specials if s.factor == factor), None)
    for which, state in enumerate(special.results if special else ()):
        made[which] = {"I": I, "P": P}.get(state, made[which])
    lowering, inner = (special.lowering, special.on(n)) if special else ("", ())
    operands, layouts = tuple((w,) for w in wants), tuple((m,) for m in made)
    return Strategy(operands, layouts, lowering, factor, inner)
