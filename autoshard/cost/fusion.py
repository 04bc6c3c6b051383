"""What of an operator's tensors goes through memory, and what its neighbours have to do with its price.

A compiled program runs chains of elementwise operators as one pass over memory. An eager one runs each
by itself, copies where a view cannot be had, and adds up the gradients of a tensor that several take.
"""

from __future__ import annotations

from typing import NamedTuple

from autoshard.cost.strides import copying
from autoshard.graph import Op, OpGraph, Ref
from autoshard.rules.rule import Rule

FUSIBLE = ("pointwise", "reduction", "norm")
BIASED = ("aten.linear.default", "aten.mm.default")
"""Products that take a bias along: the rewriter joins the two again."""


class Traffic(NamedTuple):
    """How one operator's tensors move.

    Attributes:
        taken, made: for each operand and each result, whether it goes through memory; the others stay
            in a fused chain's registers.
        copies: whether an operator that is else a view copies.
        joined: whether it runs as part of the operator before it: a product's bias.
        adds: for each operand, whether its gradient has to be added to that of another user.
    """

    taken: tuple[bool, ...]
    made: tuple[bool, ...]
    copies: bool = False
    joined: bool = False
    adds: tuple[bool, ...] = ()


def traffic(graph: OpGraph, rules: dict[str, Rule | None], *, fused: bool) -> dict[str, Traffic]:
    """The traffic of each operator, by name.

    Args:
        graph: the whole graph.
        rules: each call's rule, by name.
        fused: whether elementwise chains are one pass; False is eager execution.
    """
    family = {name: rule.family if rule else "" for name, rule in rules.items()}
    if fused:
        kept = _in_memory(graph, family)
        return {op.name: _flags(op, kept) for op in graph.ops}
    copies, seen, found = copying(graph, family), set(), {}
    for op in graph.ops:
        adds = tuple([ref in seen for ref in op.operands])
        seen.update(op.operands)
        taken, made = (True,) * len(op.operands), (True,) * len(op.results)
        joined = _is_bias(op, graph)
        found[op.name] = Traffic(taken, made, op.name in copies, joined, adds)
    return found


def _flags(op: Op, kept: dict[Ref, bool]) -> Traffic:
    return Traffic(
        tuple([kept[ref] for ref in op.operands]),
        tuple([kept.get(Ref(op.name, i), True) for i in range(len(op.results))]),
    )


def _is_bias(op: Op, graph: OpGraph) -> bool:
    """Whether an addition is a bias that capture split off its product."""
    if op.target != "aten.add.Tensor" or len(op.operands) != 2:
        return False
    product, bias = (graph.by_name[ref.op] for ref in op.operands)
    alone = len(graph.consumers[op.operands[0]]) == 1
    return alone and product.target in BIASED and bias.kind == "parameter"


def _in_memory(graph: OpGraph, family: dict[str, str]) -> dict[Ref, bool]:
    """For each tensor, whether a program with fused chains writes it to memory.

    A tensor stays in registers where it is made and taken by elementwise operators (reductions and
    norms among them) with no product between them. A view is its operand.
    """
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
            kept[ref] = kind not in FUSIBLE
        for ref in op.operands:
            made = root[ref]
            apart = kind not in FUSIBLE or level[made.op] != level[op.name]
            if apart and kind != "view":
                kept[made] = True
    return {ref: kept[made] for ref, made in root.items()}
