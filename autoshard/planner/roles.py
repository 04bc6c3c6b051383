"""What splitting a weight's dimension means to the operators that take it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.placement import Placement, Shard
from autoshard.rules.rule import Rule
from autoshard.strategies import Strategies

DEEPEST = 8
"""Views in a row between a weight and its operator; more are not followed."""


@dataclass(frozen=True)
class Part:
    """What a weight's split dimension is to one operator.

    Attributes:
        role: "column" where the dimension is of the result, "row" where it is summed over,
            "vocab" where rows of a table, "expert" where whole matrices of it are chosen from.
        node: the operator's class.
        position: which of its operands the weight is.
    """

    role: str
    node: int
    position: int


def role(
    strategies: Strategies, index: int, state: Placement, choice: tuple[int, ...] | None = None
) -> str:
    """What a weight's `state` is called: "column", "row", "vocab", "expert", "replicated" or "shard".

    Where operators differ (a tied weight), the first of "vocab", "expert", "row" and "column" is taken. It is
    "shard" where no operator says, or none takes it as it is stored.

    Args:
        strategies: what could be chosen.
        index: the weight's class.
        state: how it is stored.
        choice: each class's strategy; None asks what the operators could do.
    """
    if not isinstance(state, Shard):
        return "replicated"
    found = {part.role for part in parts(strategies, index, state, choice)}
    return next((name for name in ("vocab", "expert", "row", "column") if name in found), "shard")


def parts(
    strategies: Strategies, index: int, state: Shard, choice: tuple[int, ...] | None = None
) -> tuple[Part, ...]:
    """The operators that take a weight as it is stored; views between are followed."""
    return tuple(dict.fromkeys(_parts(strategies, index, 0, state, choice, DEEPEST)))


def _parts(
    strategies: Strategies,
    index: int,
    result: int,
    state: Shard,
    choice: tuple[int, ...] | None,
    depth: int,
) -> Iterator[Part]:
    for group in strategies.folded.groups:
        if group.producer != index or group.result != result or depth == 0:
            continue
        for node, position in group.uses:
            rule = strategies.rules[node]
            if rule is None or not _as_stored(strategies, node, position, state, choice):
                continue
            for factor in _factors(rule, position, state):
                after = _through(strategies, rule, node, factor, state, choice)
                if after is None:
                    yield Part(_role(rule, factor), node, position)
                else:
                    yield from _parts(strategies, node, *after, choice, depth - 1)


def _as_stored(
    strategies: Strategies, node: int, position: int, state: Shard, choice: tuple[int, ...] | None
) -> bool:
    """Whether an operator takes the weight in the state it is stored in."""
    return choice is None or strategies.choices[node][choice[node]].operands[position][0] == state


def _factors(rule: Rule, position: int, state: Shard) -> list[str]:
    """The factors of the operand that `state` may be a split of."""
    return [
        factor
        for factor, places in rule.places.items()
        if any(
            not is_result and (which, dim) == (position, state.dim) and state.blocks % outer == 0
            for is_result, which, dim, outer in places
        )
    ]


def _through(
    strategies: Strategies,
    rule: Rule,
    node: int,
    factor: str,
    state: Shard,
    choice: tuple[int, ...] | None,
) -> tuple[int, Shard] | None:
    """Where a view or cast leaves the factor, as (result, state); None where it is neither."""
    results = [place for place in rule.places[factor] if place[0]]
    single = len(strategies.folded.classes[node].op.operands) == 1
    if not single or not results or rule.family not in ("view", "pointwise"):
        return None
    _, which, dim, _ = results[0]
    left = strategies.choices[node][choice[node]].results[which][0] if choice else None
    return which, left if isinstance(left, Shard) else Shard(dim, state.blocks)


_NAMED = {
    "vocab_embedding": "vocab",
    "expert_products": "expert",
    "exchanged_products": "expert",
}


def _role(rule: Rule, factor: str) -> str:
    for special in rule.specials:
        if special.factor == factor and special.lowering in _NAMED:
            return _NAMED[special.lowering]
    return "column" if any(place[0] for place in rule.places[factor]) else "row"
