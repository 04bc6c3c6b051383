"""Price a plan again: its decisions as they are, its costs from today's profile and cost model."""

from __future__ import annotations

from dataclasses import replace

from autoshard.cost.hardware import Hardware
from autoshard.cost.model import Pricer
from autoshard.graph import OpGraph
from autoshard.plan_profile import profile_of
from autoshard.plan_types import Plan
from autoshard.planner import words
from autoshard.planner.communicate import collectives
from autoshard.planner.decide import Decided, apply_plan, replay
from autoshard.planner.record import cost, fallbacks, replicated
from autoshard.planner.scaling import scaling

SAME = 1e-9
"""Relative difference of times that is rounding."""


def recost(
    graph: OpGraph, plan: Plan, hardware: Hardware | None = None
) -> tuple[Decided, Plan, str]:
    """Apply a plan, and price it.

    Args:
        graph: what was captured.
        plan: what to apply.
        hardware: to price it on; None for the profile that the plan names, if that is known.

    Returns:
        its strategies; the plan, with new costs where they are others, and the baselines that need no
        solver; and a sentence on what changed, which is among its notes too. "" where nothing did.

    Raises:
        PlanError: as `apply_plan`.
    """
    profile = hardware or profile_of(plan)
    if profile is None:
        return apply_plan(graph, plan), plan, ""
    survey, decided = replay(graph, plan, profile)
    pricer, scales = (
        Pricer(profile, plan.mesh, plan.mode == "train", plan.optimizer),
        scaling(survey),
    )
    found = cost(decided, pricer, survey, scales)
    told = _told(plan, found.step_s, profile)
    if not told:
        return decided, plan, ""
    others = replicated(decided, survey, pricer)
    whole = {n: cost(other, pricer, survey, scales) for n, other in others.items()}
    again = replace(
        plan,
        hardware=profile.name,
        hardware_hash=profile.hash,
        collectives=collectives(decided, pricer),
        fallbacks=tuple(fallbacks(decided)),
        cost=replace(found, baselines=whole),
        notes=(*plan.notes, told),
    )
    return decided, again, told


def _told(plan: Plan, step_s: float, profile: Hardware) -> str:
    """What is another than the plan says; "" where nothing is."""
    times = f"{words.seconds(step_s)} a step, where it said {words.seconds(plan.cost.step_s)}"
    if profile.name != plan.hardware:
        return f"The plan was made for {plan.hardware} and is priced on {profile.name}: {times}."
    if plan.hardware_hash and profile.hash != plan.hardware_hash:
        return (
            f"The plan's costs were from a profile '{profile.name}' with other numbers than today's. "
            f"Priced again: {times}."
        )
    if abs(step_s - plan.cost.step_s) > SAME * max(step_s, plan.cost.step_s):
        return f"The plan's costs were from another version of autoshard. Priced again: {times}."
    return ""
