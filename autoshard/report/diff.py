"""What differs between two plans, as text: `-` what the first has, `+` what the second has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from autoshard.ilp.problem import PARTS
from autoshard.placement import format_layout
from autoshard.plan_types import CollectiveRecord, Cost, Plan, SolverRecord, WeightRecord
from autoshard.report import format as fmt
from autoshard.report.fold import fold_collectives

Lines = list[str]


def diff(a: Plan, b: Plan) -> str:
    """What differs from plan `a` to plan `b`; empty exactly where the two are equal.

    The text has a heading for each part that differs, and a line for each difference; equal
    differences of repeated layers are one line.
    """
    sections = {
        "planned for": _headings(a, b),
        "weights": _weights(a, b),
        "collectives": _collectives(a, b),
        "cost": _costs(a, b),
        "operators": _mapped(_choices(a), _choices(b)),
        "operators without a rule": _mapped(_fallbacks(a), _fallbacks(b)),
        "notes": _listed(a.notes, b.notes),
        "solver": _solver(a.solver, b.solver),
    }
    if a != b and not any(sections.values()):
        sections["order"] = ["  the same records, ordered or counted otherwise"]
    return "".join(
        f"{name}\n" + "".join(f"{line}\n" for line in lines)
        for name, lines in sections.items()
        if lines
    )


def _headings(a: Plan, b: Plan) -> Lines:
    def of(plan: Plan) -> dict[str, str]:
        budget = plan.memory_budget_bytes
        return {
            "model": plan.model,
            "graph": plan.fingerprint,
            "mesh": str(plan.mesh),
            "hardware": plan.hardware,
            "profile's hash": plan.hardware_hash or "unknown",
            "mode": plan.mode,
            "optimizer": _optimizer(plan),
            "search": plan.search,
            "memory budget": "none" if budget is None else f"{fmt.size(budget)} ({budget:,} B)",
            "inputs": ", ".join(plan.inputs) or "unknown",
            "repeated layers": "share their decisions" if plan.uniform else "may differ",
            "constraints": ", ".join(map("=".join, plan.constraints)) or "none",
        }

    return _mapped(of(a), of(b))


def _optimizer(plan: Plan) -> str:
    kept = plan.optimizer
    return (
        f"{kept.name}: {kept.states:g} states, {kept.state_bytes:g} B a weight beside them, gradients of "
        f"{f'{kept.gradient_bytes:g} B' if kept.gradient_bytes else 'the same dtype'}, "
        f"{kept.temporaries:g} temporaries"
    )


def _weights(a: Plan, b: Plan) -> Lines:
    """Weights that only one plan has, or that are stored otherwise, by group."""
    before, after = ({weight.fqn: weight for weight in plan.weights} for plan in (a, b))
    changes: dict[tuple[str, str, str], Lines] = {}
    for fqn in {**before, **after}:
        old, new = before.get(fqn), after.get(fqn)
        if old != new:
            either = new or old
            assert either is not None
            key = (either.group, *_stored(old, new))
            changes.setdefault(key, []).append(fqn)
    lines = []
    for (group, old, new), names in changes.items():
        title = names[0] if len(names) == 1 else f"{group} ×{len(names)}"
        lines += [f"  {title}", *([f"  - {old}"] if old else []), *([f"  + {new}"] if new else [])]
    return lines


def _stored(old: WeightRecord | None, new: WeightRecord | None) -> tuple[str, str]:
    """Both records in words: as short as tells them apart."""

    def short(weight: WeightRecord) -> str:
        local = fmt.shape(weight.local_shape)
        frozen = "" if weight.trainable else ", frozen"
        return (
            f"{weight.split} {format_layout(weight.placements)}: {local} {weight.dtype}"
            f" of {fmt.shape(weight.shape)}, {fmt.size(weight.stored_bytes)} a rank{frozen}"
        )

    if old is None or new is None:
        return (short(old) if old else "", short(new) if new else "")
    if short(old) != short(new):
        return short(old), short(new)
    return _full(old), _full(new)


def _full(weight: WeightRecord) -> str:
    return (
        f"{weight.stored_bytes:,} B, named {', '.join(weight.fqns)}, in {weight.group}: "
        f"{weight.reason}"
    )


def _collectives(a: Plan, b: Plan) -> Lines:
    def of(plan: Plan) -> dict[str, str]:
        found: dict[str, str] = {}
        for row in fold_collectives(plan.collectives):
            place, value = _collective(row)
            found[place] = f"{found[place]}; {value}" if place in found else value
        return found

    return _mapped(of(a), of(b))


def _collective(row: CollectiveRecord) -> tuple[str, str]:
    where = f"{row.kind} {row.phase} on {row.axis} at {row.module or 'the model itself'} {row.op}"
    value = (
        f"{fmt.shape(row.tensor_shape)}, {row.bytes:,} B, ×{row.count:,}, "
        f"{fmt.seconds(row.time_s)} each: {row.reason}"
    )
    return where, value


def _costs(a: Plan, b: Plan) -> Lines:
    lines = _cost("this plan", a.cost, b.cost)
    for name in sorted({*a.cost.baselines, *b.cost.baselines}):
        old, new = a.cost.baselines.get(name), b.cost.baselines.get(name)
        if old is None or new is None:
            lines.append(f"  {'+' if old is None else '-'} baseline {name}")
        else:
            lines += _cost(f"baseline {name}", old, new)
    return lines


def _cost(name: str, old: Cost, new: Cost) -> Lines:
    """A line for each time and each part of memory that differs."""
    rows: list[tuple[str, float, float, Callable[..., str]]] = [
        (part, getattr(old, f"{part}_s"), getattr(new, f"{part}_s"), fmt.seconds)
        for part in ("step", "compute", "comm")
    ]
    rows += [
        (part, getattr(old.memory, f"{part}_bytes"), getattr(new.memory, f"{part}_bytes"), fmt.size)
        for part in ("peak", *PARTS, "slack")
    ]
    lines = [
        f"  {name} {part}: {_change(before, after, show)}"
        for part, before, after, show in rows
        if before != after
    ]
    before, after = (f"{m.peak_at}: {m.parts}" for m in (old.memory, new.memory))
    if before != after and not lines:
        lines.append(f"  {name} when most is held: {before} → {after}")
    return lines


def _change(before: float, after: float, show: Callable[..., str]) -> str:
    """Both numbers, and by how much the second is more or less."""
    if show(before) == show(after):
        return f"{before!r} → {after!r}"
    if not before:
        return f"{show(before)} → {show(after)}"
    return (
        f"{show(before)} → {show(after)} ({'+' if after > before else '−'}{_part(before, after)})"
    )


def _part(before: float, after: float) -> str:
    return fmt.percent(abs(after - before) / abs(before))


def _choices(plan: Plan) -> dict[str, str]:
    return {choice.key: f"×{choice.count:,} {choice.strategy}" for choice in plan.choices}


def _fallbacks(plan: Plan) -> dict[str, str]:
    return {
        row.op: f"×{row.count:,}, {row.cost_s!r} s, in {', '.join(row.modules)}"
        for row in plan.fallbacks
    }


def _solver(a: SolverRecord, b: SolverRecord) -> Lines:
    names = ("name", "status", "objective_s", "bound_s", "gap", "binaries", "constraints")
    return _mapped(*({name: str(getattr(of, name)) for name in names} for of in (a, b)))


def _mapped(old: Mapping[str, str], new: Mapping[str, str]) -> Lines:
    """The differences of two mappings: a short one on one line, a long one below its name."""
    lines = []
    for name in {**old, **new}:
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if before is not None and after is not None and len(name + before + after) < 80:
            lines.append(f"  {name}: {before} → {after}")
            continue
        lines.append(f"  {name}")
        lines += [f"  - {before}"] if before is not None else []
        lines += [f"  + {after}"] if after is not None else []
    return lines


def _listed(old: Iterable[str], new: Iterable[str]) -> Lines:
    old, new = list(old), list(new)
    return [f"  - {line}" for line in old if line not in new] + [
        f"  + {line}" for line in new if line not in old
    ]
