"""The user's constraints: pin how weights are stored, before solving."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from fnmatch import fnmatchcase

from autoshard.errors import ConstraintError
from autoshard.graph import OpGraph
from autoshard.placement import I, Shard
from autoshard.planner.roles import role
from autoshard.strategies import Strategies, Strategy

_SHARD = re.compile(r"shard\((\d+)(?:,\s*(\d+))?\)")
SPLITS = ("column", "row", "replicated", "vocab", "expert")


def labels(graph: OpGraph, constraints: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """For each parameter that a constraint names, the split it asks for; the last match counts.

    Raises:
        ConstraintError: a glob matches no parameter, or a split is unknown.
    """
    found: dict[str, str] = {}
    names = {fqn: op.name for op in graph.weights for fqn in op.fqns}
    for glob, split in constraints:
        if split not in SPLITS and not _SHARD.fullmatch(split):
            raise ConstraintError(
                f"'{split}' is not a split.", glob, f"Use {', '.join(SPLITS)} or shard(dim)."
            )
        hits = [fqn for fqn in names if fnmatchcase(fqn, glob)]
        if not hits:
            near = difflib.get_close_matches(glob, names, 3, 0.3)
            fix = f"The nearest are {', '.join(near)}." if near else "The model has no parameters."
            raise ConstraintError("The constraint matches no parameter.", glob, fix)
        found |= {names[fqn]: split for fqn in hits}
    return found


def constrained(strategies: Strategies, constraints: tuple[tuple[str, str], ...]) -> Strategies:
    """Keep, of each constrained weight's strategies, those that it asks for.

    Raises:
        ConstraintError: there is none.
    """
    folded = strategies.folded
    wanted = labels(folded.graph, constraints)
    choices = list(strategies.choices)
    for index, cls in enumerate(folded.classes):
        split = wanted.get(cls.op.name)
        if split is None:
            continue
        kept = tuple(s for s in choices[index] if _is(strategies, index, s, split))
        if not kept:
            can = sorted({_name(strategies, index, s) for s in choices[index]})
            raise ConstraintError(
                f"The weight cannot be stored '{split}'.",
                cls.op.target,
                f"It can be {', '.join(can)}.",
            )
        choices[index] = kept
    return replace(strategies, choices=tuple(choices))


def _is(strategies: Strategies, index: int, strategy: Strategy, split: str) -> bool:
    if match := _SHARD.fullmatch(split):
        return strategy.results[0] == (Shard(int(match[1]), int(match[2] or 1)),)
    return split in (_name(strategies, index, strategy), _plain(_name(strategies, index, strategy)))


def _plain(name: str) -> str:
    """A split's plain name: splitting a vocabulary is splitting an embedding's rows."""
    return {"vocab": "row"}.get(name, name)


def _name(strategies: Strategies, index: int, strategy: Strategy) -> str:
    state = strategy.results[0][0]
    return "replicated" if state == I else role(strategies, index, state)
