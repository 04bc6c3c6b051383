"""Put prices to strategies: the integer program's costs, from the rules, the graph and the hardware."""

from __future__ import annotations

from collections import Counter

from autoshard.cost.fusion import Traffic
from autoshard.cost.model import Pricer
from autoshard.fold import ValueGroup
from autoshard.graph import Op
from autoshard.ilp.problem import Node, Problem, Tensor, Use
from autoshard.placement import I, Layout, R, Shard, convertible
from autoshard.planner.lowered import lowered_s
from autoshard.planner.memory import holds
from autoshard.planner.survey import Survey
from autoshard.strategies import Strategies, Strategy


def price(
    strategies: Strategies,
    pricer: Pricer,
    survey: Survey,
    budget_bytes: int | None,
) -> Problem:
    """The problem of choosing among `strategies` at these prices.

    Args:
        strategies: what may be chosen.
        pricer: what it costs.
        survey: of the whole graph: how its tensors move, and how long they live.
        budget_bytes: of memory a rank, or None.
    """
    folded = strategies.folded
    nodes = tuple(
        _node(strategies, pricer, survey.traffic[i], i) for i in range(len(folded.classes))
    )
    stated = [_tensor(strategies, pricer, group) for group in folded.groups]
    tensors, states = tuple(t for t, _ in stated), tuple(s for _, s in stated)
    held = holds(survey.lifetimes, strategies, pricer, tensors, states)
    slack = pricer.hardware.allocator_slack
    return Problem(nodes, tensors, budget_bytes, held, survey.lifetimes.moments, slack)


def _node(strategies: Strategies, pricer: Pricer, traffic: Counter[Traffic], index: int) -> Node:
    folded = strategies.folded
    cls, rule = folded.classes[index], strategies.rules[index]
    op, operands = cls.op, folded.operand_metas(index)
    costs, ties = [], []
    for strategy in strategies.choices[index]:
        if op.stored:
            meta = op.results[0]
            assert meta is not None
            costs.append(pricer.optimizer_s(meta, strategy.results[0]))
        else:
            costs.append(
                sum(
                    count * pricer.op_s(op, rule, strategy, operands, moves)
                    for moves, count in traffic.items()
                )
                / cls.count
                + lowered_s(strategy, pricer)
            )
        ties.append(_tie(strategy) + _stored_tie(op, strategy))
    return Node(cls.key, cls.count, tuple(costs), tuple(ties))


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


def _tensor(
    strategies: Strategies, pricer: Pricer, group: ValueGroup
) -> tuple[Tensor, tuple[Layout, ...]]:
    """A tensor between operators, and the states that its numbers stand for."""
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
    made_of = Tensor(group.producer, group.count, haves, tuple(uses), costs, ties)
    return made_of, tuple(states)


def _allowed(have: Layout, want: Layout, *, fixed: bool, locked: bool) -> bool:
    """Whether a tensor may be converted: what is written to never, a weight used as stored hardly."""
    if have == want:
        return True
    if locked:
        return False
    if fixed:
        return all(h == w or (h == I and w == R) for h, w in zip(have, want, strict=True))
    return convertible(have, want)
