"""Operators and tensors as a report names them: by their module where it is one operator's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from autoshard.fold import Folded, OpClass, star
from autoshard.graph import OpGraph
from autoshard.strategies import Strategies

MOST = 4
"""More names than this are counted rather than listed."""
DEEPEST = 8
"""Views in a row that are looked through."""
OUTPUT = "the output"
_OF_ALL = {2: "both", 3: "all three", 4: "all four"}


def listed(names: Iterable[str]) -> str:
    """Names in a sentence, each once: "q_proj, k_proj and v_proj", "q_proj, k_proj, v_proj and 3 more"."""
    found = list(dict.fromkeys(names))
    if len(found) > MOST:
        return f"{', '.join(found[: MOST - 1])} and {len(found) - MOST + 1} more"
    *first, last = found or [""]
    return f"{', '.join(first)} and {last}" if first else last


def for_all(count: int) -> str:
    """What follows a list of that many names: " once for all three"; "" after one."""
    return "" if count < 2 else f" once for {_OF_ALL.get(count, 'all of them')}"


def operator(target: str) -> str:
    """An operator's name alone: "aten.mul.Tensor" → "mul"."""
    parts = target.split(".")
    return parts[1] if len(parts) > 2 else target


def weight(fqn: str) -> str:
    """The end of a weight's name: "layers.0.mlp.up_proj.weight" → "up_proj.weight"."""
    module, _, name = fqn.rpartition(".")
    return f"{tail(module)}.{name}" if module else name


def tail(module: str) -> str:
    """The end of a module's path that names it: "layers.*.mlp.up_proj" → "up_proj"; "0" takes more."""
    parts = module.split(".")
    at = next((i for i in range(len(parts) - 1, -1, -1) if not _is_index(parts[i])), None)
    return ".".join(parts[at:]) if at is not None else f"module {module}"


def _is_index(part: str) -> bool:
    return part.isdigit() or part == "*"


def made(strategies: Strategies, index: int, takers: Sequence[int]) -> str:
    """What makes a tensor that `takers` take: a leaf, a module, or an operator in a module."""
    folded = strategies.folded
    cls = folded.classes[before_views(strategies, index)]
    if cls.op.stored:
        return weight(cls.op.target)
    if cls.op.kind == "input":
        return cls.op.target
    inside = any(folded.classes[taker].module == cls.module for taker in takers)
    return _called(folded.graph, cls, inside=inside)


def taken(strategies: Strategies, index: int, producer: int) -> list[str]:
    """What takes a tensor that `producer` makes: modules, operators in one, or the output."""
    folded, found = strategies.folded, []
    maker = folded.classes[before_views(strategies, producer)]
    for node in after_views(strategies, index):
        cls = folded.classes[node]
        inside = maker.module == cls.module and not maker.op.stored
        ends = cls.op.kind == "output"
        found.append(OUTPUT if ends else _called(folded.graph, cls, inside=inside))
    return list(dict.fromkeys(found))


def before_views(strategies: Strategies, index: int) -> int:
    """The class whose result a class views; the class itself where it is no view."""
    for _ in range(DEEPEST):
        makers = strategies.folded.sources.get((index, 0), ())
        if not _is_view(strategies, index) or len(makers) != 1:
            break
        index = makers[0][0]
    return index


def after_views(strategies: Strategies, index: int, depth: int = DEEPEST) -> list[int]:
    """The classes that take what a class views; the class itself where it is no view."""
    folded = strategies.folded
    groups = [group for group in folded.groups if group.producer == index]
    if not _is_view(strategies, index) or not groups or depth == 0:
        return [index]
    nodes = dict.fromkeys(node for group in groups for node, _ in group.uses)
    found = [end for node in nodes for end in after_views(strategies, node, depth - 1)]
    return list(dict.fromkeys(found))


def _is_view(strategies: Strategies, index: int) -> bool:
    rule = strategies.rules[index]
    return rule is not None and rule.family == "view"


def _called(graph: OpGraph, cls: OpClass, *, inside: bool) -> str:
    name, module = operator(cls.op.target), cls.op.module
    if not module:
        return name
    end = tail(star(module, graph.blocks))
    own = module not in graph.blocks
    return end if own and not inside else f"{name} in {end}"


def common_module(folded: Folded, nodes: Iterable[int]) -> str:
    """The module that all of these stand in, with the indices of repeated layers starred."""
    paths = [star(folded.classes[node].module, folded.graph.blocks).split(".") for node in nodes]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared)


def size(count: float) -> str:
    """Bytes as text: 57344 → "56 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def seconds(count: float) -> str:
    """A time as a sentence has it: "1.31 ms"."""
    for least, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if count >= least:
            return f"{count / least:.3g} {unit}"
    return f"{count / 1e-9:.3g} ns"
