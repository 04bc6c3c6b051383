"""Put prices to strategies: the integer program's costs, from the rules, the graph and the hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoshard.cost.fusion import Traffic
from autoshard.cost.model import Pricer
from autoshard.fold import ValueGroup
from autoshard.graph import Op
from autoshard.ilp.problem import Node, Problem, Tensor, Use
from autoshard.placement import I, Layout, R, Shard, convertible
from autoshard.planner.lowered import lowered_s
from autoshard.strategies import Strategies, Strategy


def price(
    strategies: Strategies,
    pricer: Pricer,
    traffic: Sequence[Counter[Traffic]],
    budget_bytes: int | None,
) -> Problem:
    """The problem of choosing among `strategies` at these prices.

    Args:
        strategies: what may be chosen.
        pricer: what it costs.
        traffic: for each class, how its tensors move; see `survey.Survey`.
        budget_bytes: of memory a rank, or None.
    """
    folded = strategies.folded
    nodes = tuple(_node(strategies, pricer, traffic[i], i) for i in range(len(folded.classes)))
    tensors = tuple(_tensor(strategies, pricer, group) for group in folded.groups)
    return Problem(nodes, tensors, budget_bytes)


def _node(strategies: Strategies, pricer: Pricer, traffic: Counter[Traffic], index: int) -> Node:
    folded = strategies.folded
    cls, rule = folded.classes[index], strategies.rules[index]
    op, operands = cls.op, folded.operand_metas(index)
    costs, ties, sizes, transients = [], [], [], []
    for strategy in strategies.choices[index]:
        if op.stored:
            meta = op.results[0]
            assert meta is not None
            costs.append(pricer.optimizer_s(meta, strategy.results[0]))
            sizes.append(sum(pricer.weight_bytes(meta, strategy.results[0])))
            transients.append(0)
        else:
            costs.append(
                sum(
                    count * pricer.op_s(op, rule, strategy, operands, moves)
                    for moves, count in traffic.items()
                )
                / cls.count
                + lowered_s(strategy, pricer)
            )
            saved = [
                count * _activation_bytes(strategies, pricer, strategy, index, moves.made)
                for moves, count in traffic.items()
            ]
            sizes.append(-(-sum(saved) // cls.count))
            transients.append(_result_bytes(pricer, op, strategy))
        ties.append(_tie(strategy) + _stored_tie(op, strategy))
    return Node(cls.key, cls.count, tuple(costs), tuple(ties), tuple(sizes), tuple(transients))


def _activation_bytes(
    strategies: Strategies, pricer: Pricer, strategy: Strategy, index: int, kept: tuple[bool, ...]
) -> int:
    """Bytes of results that are kept for backward; a first estimate: those that go through memory."""
    op, rule = strategies.folded.classes[index].op, strategies.rules[index]
    if not pricer.train or op.kind != "call" or (rule and rule.family == "view"):
        return 0
    return sum(
        pricer.local_bytes(meta, layout)
        for meta, layout, stored in zip(op.results, strategy.results, kept, strict=True)
        if meta is not None and meta.grad and stored
    )


def _result_bytes(pricer: Pricer, op: Op, strategy: Strategy) -> int:
    """Bytes of an operator's results while it runs."""
    if op.kind != "call":
        return 0
    pairs = zip(op.results, strategy.results, strict=True)
    return sum(pricer.local_bytes(meta, layout) for meta, layout in pairs if meta)


def _tie(strategy: Strategy) -> float:
    """Among equals: contiguous shards, no shares carried along, and no needless Replicate."""
    states = [p for layout in (*strategy.operands, *strategy.results) for p in layout]
    blocks = sum(isinstance(p, Shard) and p.blocks > 1 for p in states)
    carried = 0.05 if strategy.factor == "share" else 0.0
    return 0.1 * blocks + carried + 0.01 * sum(p == R for p in states)


def _stored_tie(op: Op, strategy: Strategy) -> float:
    """Among equals, a vector is stored whole and a matrix split."""
    meta = op.results[0] if op.kind == "parameter" else None
    if meta is None:
        return 0.0
    split = any(isinstance(p, Shard) for p in strategy.results[0])
    return 0.2 if split == (len(meta.shape) < 2) else 0.0


def _tensor(strategies: Strategies, pricer: Pricer, group: ValueGroup) -> Tensor:
    folded, choices = strategies.folded, strategies.choices
    meta = (
        folded.graph.meta(group.example)
        if folded.classes[group.producer].op.results[group.result]
        else None
    )
    made = [s.results[group.result] for s in choices[group.producer]]
    wanted = [[s.operands[position] for s in choices[node]] for node, position in group.uses]
    states = list(dict.fromkeys([*made, *(layout for want in wanted for layout in want)]))
    number = {layout: index for index, layout in enumerate(states)}
    haves = tuple(number[layout] for layout in made)
    fixed = (group.producer, group.result) in strategies.fixed
    uses = []
    for (node, position), want in zip(group.uses, wanted, strict=True):
        locked = (node, position) in strategies.locked
        wants = tuple(number[layout] for layout in want)
        pairs = frozenset(
            (h, w)
            for h in set(haves)
            for w in set(wants)
            if _allowed(states[h], states[w], fixed=fixed, locked=locked)
        )
        uses.append(Use(node, wants, pairs))
    possible = sorted({pair for use in uses for pair in use.pairs if pair[0] != pair[1]})
    costs, ties = {}, {}
    for h, w in possible:
        steps = pricer.conversion(meta, states[h], states[w]) if meta else ()
        costs[h, w] = sum(step.time_s for step in steps)
        ties[h, w] = 1.0 + 0.1 * len(steps)
    return Tensor(group.producer, group.count, haves, tuple(uses), costs, ties)


def _allowed(have: Layout, want: Layout, *, fixed: bool, locked: bool) -> bool:
    """Whether a tensor may be converted: what is written to never, a weight used as stored hardly."""
    if have == want:
        return True
    if locked:
        return False
    if fixed:
        return all(h == w or (h == I and w == R) for h, w in zip(have, want, strict=True))
    return convertible(have, want)
