"""What splitting a weight's dimension means to the operator that takes it."""

from __future__ import annotations

from autoshard.placement import Placement, Shard
from autoshard.strategies import Strategies


def role(strategies: Strategies, index: int, state: Placement) -> str:
    """"column" where the dimension is of the result, "row" where it is summed over, or "vocab".

    Views between the weight and its operator are followed. "shard" where no operator says.
    """
    if not isinstance(state, Shard):
        return "replicated"
    found = _roles(strategies, index, 0, state, depth=0)
    return next((name for name in ("vocab", "row", "column") if name in found), "shard")


def _roles(strategies: Strategies, index: int, result: int, state: Shard, depth: int) -> set[str]:
    found: set[str] = set()
    for group in strategies.folded.groups:
        if group.producer != index or group.result != result or depth > 8:
            continue
        for node, position in group.uses:
            found |= _role_at(strategies, node, position, state, depth)
    return found


def _role_at(strategies: Strategies, node: int, position: int, state: Shard, depth: int) -> set[str]:
    """The role at one operator; through a view, at those that take its result."""
    rule = strategies.rules[node]
    if rule is None:
        return set()
    found: set[str] = set()
    for factor, places in rule.places.items():
        if not any(
            (which, dim) == (position, state.dim) and state.blocks % outer == 0
            for is_result, which, dim, outer in places
            if not is_result
        ):
            continue
        in_result = [(which, dim, outer) for is_result, which, dim, outer in places if is_result]
        single = len(strategies.folded.classes[node].op.operands) == 1
        if single and in_result and rule.family in ("view", "pointwise"):
            which, dim, _ = in_result[0]
            found |= _roles(strategies, node, which, Shard(dim, state.blocks), depth + 1)
        elif any(s.factor == factor and s.lowering == "vocab_embedding" for s in rule.specials):
            found.add("vocab")
        else:
            found.add("column" if in_result else "row")
    return found
