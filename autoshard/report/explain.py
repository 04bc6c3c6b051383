"""One weight of a plan: how it is stored, why, what it costs, and what is communicated around it."""

from __future__ import annotations

import difflib
import re
import textwrap

from autoshard.errors import PlanError
from autoshard.plan_types import CollectiveRecord, Plan, WeightRecord
from autoshard.report import format as fmt
from autoshard.report.fold import decision, fold_collectives, whole_bytes

_INDENT = 14
_WIDTH = 100


def explain(plan: Plan, fqn: str) -> str:
    """Why the weight `fqn` is stored as it is, as lines of text that end with a newline.

    `fqn` is any of the weight's names, or the name of its group (`layers.*.mlp.up_proj.weight`).

    Raises:
        PlanError: the plan has no such weight; the nearest names are given.
    """
    weight = _find(plan, fqn)
    facts = [*_facts(plan, weight), *_neighbourhood(plan, weight)]
    lines = [weight.fqn]
    for label, text in facts:
        first, *rest = textwrap.wrap(
            text, _WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False
        ) or [""]
        lines.append(f"  {label:<{_INDENT - 3}} {first}")
        lines.extend(" " * _INDENT + line for line in rest)
    return "\n".join(lines) + "\n"


def _find(plan: Plan, fqn: str) -> WeightRecord:
    for weight in plan.weights:
        if fqn in weight.fqns:
            return weight
    for weight in plan.weights:
        if fqn == weight.group:
            return weight
    names = [name for weight in plan.weights for name in weight.fqns]
    inside = [name for name in names if name.startswith(f"{fqn}.")]
    near = inside[:3] or difflib.get_close_matches(fqn, names, n=3, cutoff=0.4)
    raise PlanError(
        f"The plan has no weight '{fqn}'.",
        where=f"the plan of {plan.model}, of {fmt.plural(len(plan.weights), 'weight')}",
        fix=f"Did you mean {' or '.join(near)}?" if near else "`autoshard show` lists them.",
    )


def _facts(plan: Plan, weight: WeightRecord) -> list[tuple[str, str]]:
    """The weight's own record, a labelled sentence each."""
    whole, local = fmt.shape(weight.shape), fmt.shape(weight.local_shape)
    shape = f"{whole} {weight.dtype}"
    shape += f", of which a rank holds {local}" if whole != local else ", on every rank"
    total = whole_bytes(weight)
    facts = [
        ("split", f"{weight.split}: {fmt.layout(weight.placements, plan.mesh)}"),
        ("shape", shape),
        ("memory", f"{fmt.size(weight.stored_bytes)} a rank of {fmt.size(total)} in all"),
        ("why", weight.reason or "the plan gives no reason"),
    ]
    if not weight.trainable:
        facts.append(("gradient", "none: the weight is frozen"))
    if len(weight.fqns) > 1:
        facts.append(("tied to", ", ".join(weight.fqns[1:])))
    group = [other for other in plan.weights if other.group == weight.group]
    if len(group) > 1:
        alike = sum(decision(other) == decision(weight) for other in group)
        others = "" if alike == len(group) else f"; {len(group) - alike} are stored otherwise"
        facts.append(("repeated", f"{alike} of {len(group)} alike, {weight.group}{others}"))
    return facts


def _neighbourhood(plan: Plan, weight: WeightRecord) -> list[tuple[str, str]]:
    """The strategies of the operators in the weight's module, and the collectives there."""
    module = weight.group.rpartition(".")[0]
    inside = re.compile(rf"{re.escape(module)}(?![\w.*])")
    facts = [
        ("operator", f"{choice.key} ×{choice.count:,}: {choice.strategy}")
        for choice in plan.choices
        if module and inside.match(choice.key)
    ]
    rows = [row for row in fold_collectives(plan.collectives) if _concerns(row, module)]
    facts.extend((row.phase, _collective(row)) for row in rows)
    if not rows:
        facts.append(("collective", f"none in {module or 'the model itself'}"))
    return facts


def _concerns(row: CollectiveRecord, module: str) -> bool:
    """Whether a collective is in the module, or is one that it shares with modules beside it."""
    above, _, name = module.rpartition(".")
    shared = row.module == above and re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", row.reason)
    return row.module == module or bool(above and shared)


def _collective(row: CollectiveRecord) -> str:
    when = "after" if row.phase == "forward" else "in the backward of"
    return (
        f"{row.kind} on {row.axis} {when} {fmt.operator(row.op)}, {fmt.shape(row.tensor_shape)}, "
        f"{fmt.size(row.bytes)}, ×{row.count:,}, "
        f"{fmt.seconds(row.count * row.time_s)} in all: {row.reason}"
    )
