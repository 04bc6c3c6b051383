"""The hardware profile that a plan's costs are from, and whether it still is what it was."""

from __future__ import annotations

from autoshard.cost.hardware import Hardware, hardware_names, load_hardware
from autoshard.plan_types import Plan


def profile_of(plan: Plan) -> Hardware | None:
    """The profile of the name that a plan has, as it is today; None for one of the user's own."""
    return load_hardware(plan.hardware) if plan.hardware in hardware_names() else None


def changed_profile(plan: Plan) -> str:
    """A sentence where a plan's costs are from another profile than the one of its name; else ""."""
    found = profile_of(plan)
    if found is None or not plan.hardware_hash or found.hash == plan.hardware_hash:
        return ""
    return (
        f"The costs are from a profile '{plan.hardware}' with other numbers than today's: plan again, "
        "or apply the plan, to have it priced as the profile is now."
    )
