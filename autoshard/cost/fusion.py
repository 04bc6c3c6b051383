"""Which tensors go through memory, where chains of elementwise operators run as one pass."""

from __future__ import annotations

from autoshard.graph import OpGraph, Ref
from autoshard.rules.rule import Rule

FUSIBLE = ("pointwise", "reduction", "norm")


def in_memory(graph: OpGraph, rules: dict[str, Rule | None], *, fused: bool) -> dict[Ref, bool]:
    """For each tensor, whether it is written to memory.

    In a fused program a tensor stays in registers where it is made and taken by elementwise operators
    (reductions and norms among them) with no product between them. A view is its operand.

    Args:
        graph: the whole graph.
        rules: each call's rule, by name.
        fused: False writes every tensor, as eager execution does.
    """
    family = {name: rule.family if rule else "" for name, rule in rules.items()}
    root: dict[Ref, Ref] = {}
    level: dict[str, int] = {}
    kept: dict[Ref, bool] = {}
    for op in graph.ops:
        kind = family.get(op.name, "")
        depth = max((level[root[ref].op] for ref in op.operands), default=0)
        level[op.name] = depth if kind in FUSIBLE or kind == "view" else depth + 1
        for index in range(len(op.results)):
            ref = Ref(op.name, index)
            root[ref] = root[op.operands[0]] if kind == "view" and op.operands else ref
            kept[ref] = not fused or kind not in FUSIBLE
        for ref in op.operands:
            made = root[ref]
            apart = kind not in FUSIBLE or level[made.op] != level[op.name]
            if apart and kind != "view":
                kept[made] = True
    return {ref: kept[made] for ref, made in root.items()}
