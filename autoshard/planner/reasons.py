"""Why each weight is stored as it is, in a sentence."""

from __future__ import annotations

from autoshard.cost.model import Pricer
from autoshard.cuts import reaches
from autoshard.graph import Op
from autoshard.placement import Invariant, Layout, R, Shard
from autoshard.planner import words
from autoshard.planner.decide import Decided
from autoshard.planner.roles import Part, parts


def why(decided: Decided, pricer: Pricer, op: Op, split: str, *, pinned: bool) -> str:
    """One sentence on why a weight is stored as it is.

    Args:
        decided: the decision.
        pricer: its prices.
        op: the weight.
        split: what its placement is called: `roles.role`.
        pinned: whether a constraint names it.
    """
    index = decided.folded.class_of[op.name]
    layout = decided.strategy(op.name).results[0]
    state = next((p for p in layout if isinstance(p, Shard)), None)
    if state is None:
        text = _whole(decided, pricer, index, pinned=pinned)
        return text + (_summed(decided, index, layout) if op.results[0].grad else "")  # type: ignore[union-attr]
    blocks = f"; cut alike inside each of {state.blocks} blocks" if state.blocks > 1 else ""
    return (
        _split(decided, index, state, split) + blocks + (", as a constraint asks" if pinned else "")
    )


# --- split --------------------------------------------------------------------------------------


def _split(decided: Decided, index: int, state: Shard, split: str) -> str:
    found = parts(decided.strategies, index, state, decided.choice)
    first = next((part for part in found if part.role == split), None)
    if first is None:
        return f"each rank stores a slice; gathered for {_takers(decided, index)}"
    text = _as(decided, first)
    for other in found:
        if other.role != split:
            where = words.listed(words.taken(decided.strategies, other.node, index))
            kind = "input" if other.role == "row" else "output"
            return f"{text}; for {where} they are the {kind} features"
    return text


def _takers(decided: Decided, index: int) -> str:
    groups = [group for group in decided.folded.groups if group.producer == index]
    nodes = [node for group in groups for node, _ in group.uses]
    names = [words.taken(decided.strategies, node, index) for node in nodes]
    return words.listed(name for found in names for name in found)


def _as(decided: Decided, part: Part) -> str:
    """What the split is to the operator that takes the weight."""
    rule, cls = decided.strategies.rules[part.node], decided.folded.classes[part.node]
    family = rule.family if rule else ""
    kind = "channels" if "conv" in cls.op.target else "features"
    if part.role == "vocab":
        return "rows split: each rank looks up its own, and its result is a share"
    if part.role == "expert":
        return "experts split: each rank runs the tokens of its own, and its result is a share"
    if part.role == "row":
        return f"input {kind} split, {_input(decided, part)}: each rank's result is a share"
    if family == "contraction":
        return f"output {kind} split: each rank makes its part of the result from the whole input"
    if family == "gather":
        return "features split: each rank looks up its part of every row"
    if family == "norm":
        return "channels split: each rank normalises its own"
    return f"split as the tensor that it is {_met(words.operator(cls.op.target))}"


def _met(operator: str) -> str:
    known = {"add": "added to", "sub": "subtracted from", "mul": "multiplied with"}
    return known.get(operator, f"used with in {operator}")


def _input(decided: Decided, part: Part) -> str:
    """Whether a row-parallel product's other operands come split, or are cut for it."""
    folded, choices = decided.folded, decided.strategies.choices
    wants = choices[part.node][decided.choice[part.node]].operands
    converted = any(
        choices[maker][decided.choice[maker]].results[result] != want
        for position, want in enumerate(wants)
        if position != part.position
        for maker, result in folded.sources.get((part.node, position), ())
    )
    return "and its input is cut to match" if converted else "as its input comes"


# --- whole --------------------------------------------------------------------------------------


def _whole(decided: Decided, pricer: Pricer, index: int, *, pinned: bool) -> str:
    """Why a weight is whole on every rank."""
    choices, op = decided.strategies.choices[index], decided.folded.classes[index].op
    if decided.strategies.mesh.size == 1:
        return "there is one rank"
    if pinned:
        return "a constraint asks for it"
    if _written_to(decided, index):
        return "forward writes to it, or to a view of it"
    if len(choices) == 1:
        return _cannot(decided, index)
    meta, solution = op.results[0], decided.solution
    assert meta is not None
    whole, *split = [sum(pricer.weight_bytes(meta, s.results[0])) for s in choices]
    saved = words.size(whole - min(split))
    if solution is None or not solution.status.startswith("optimal"):
        return f"splitting it would save {saved} of a rank's memory; no faster plan was found with it split"
    return f"splitting it would save {saved} of a rank's memory, and no time"


def _written_to(decided: Decided, index: int) -> bool:
    """Whether some operator takes a weight as it is, for its memory is written to."""
    folded = decided.folded
    uses = [use for g in folded.groups if g.producer == index for use in g.uses]
    return any(position in folded.classes[node].op.pinned for node, position in uses)


def _cannot(decided: Decided, index: int) -> str:
    """Why a weight could not be split."""
    folded, n = decided.folded, decided.strategies.mesh.size
    uses = [use for g in folded.groups if g.producer == index for use in g.uses]
    if not uses:
        return "nothing uses it"
    lacking = [node for node, _ in uses if decided.strategies.rules[node] is None]
    if lacking:
        names = words.listed(folded.classes[node].op.target for node in lacking)
        return f"{names} has no rule that splits it"
    rules = decided.strategies.rules
    noisy = [c.key for c, rule in zip(folded.classes, rules, strict=True) if rule and rule.noise]
    if noisy:
        return f"{noisy[0]} makes rounding error of what it is given"
    meta = folded.classes[index].op.results[0]
    assert meta is not None
    if not any(reaches(size, n) for size in meta.shape):
        return f"no dimension of {list(meta.shape)} has a slice for each of {n} ranks"
    return f"{_takers(decided, index)} needs it whole"


def _summed(decided: Decided, index: int, layout: Layout) -> str:
    """What is said of a whole weight whose gradient is a share on each rank."""
    folded, choices = decided.folded, decided.strategies.choices
    shared = any(
        isinstance(have, Invariant) and want == R
        for group in folded.groups
        if group.producer == index
        for node, position in group.uses
        for have, want in zip(
            layout, choices[node][decided.choice[node]].operands[position], strict=True
        )
    )
    return "; each rank's gradient is a share, and summed" if shared else ""
