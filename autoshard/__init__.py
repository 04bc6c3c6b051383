"""autoshard: a compiler pass that shards PyTorch models automatically.

    from autoshard import autoshard

    model = autoshard(model, world_size=8, args=(input_ids,))

The public names are imported at first use, so `import autoshard` alone is instant and imports no
torch. Every name's home is in `_HOMES`; tests/test_public_surface.py freezes them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoshard import errors, rules
    from autoshard.api import autoshard, plan, verify
    from autoshard.cost.hardware import Hardware
    from autoshard.cost.optimizer import Optimizer
    from autoshard.errors import (
        AutoshardError,
        CalibrationError,
        CaptureError,
        ConstraintError,
        InfeasibleError,
        MeshError,
        OptionsError,
        PlanError,
        RuleError,
        SolverError,
        VerifyError,
    )
    from autoshard.mesh import Mesh, MeshAxis
    from autoshard.placement import Invariant, Partial, Replicate, Shard
    from autoshard.plan_types import Plan
    from autoshard.runtime.sharded_module import ShardedModule
    from autoshard.verification import Verification

__version__ = "0.1.0"

__all__ = [
    "AutoshardError",
    "CalibrationError",
    "CaptureError",
    "ConstraintError",
    "Hardware",
    "InfeasibleError",
    "Invariant",
    "Mesh",
    "MeshAxis",
    "MeshError",
    "Optimizer",
    "OptionsError",
    "Partial",
    "Plan",
    "PlanError",
    "Replicate",
    "RuleError",
    "Shard",
    "ShardedModule",
    "SolverError",
    "Verification",
    "VerifyError",
    "__version__",
    "autoshard",
    "errors",
    "plan",
    "rules",
    "verify",
]

# Importing a submodule sets an attribute of its name on the package, so no submodule may be called
# `autoshard`, `plan` or `verify`: those are functions. (Plan's module is therefore `plan_types`.)
_HOMES = {
    "autoshard": "api",
    "plan": "api",
    "verify": "api",
    "Hardware": "cost.hardware",
    "Optimizer": "cost.optimizer",
    "AutoshardError": "errors",
    "CalibrationError": "errors",
    "CaptureError": "errors",
    "ConstraintError": "errors",
    "InfeasibleError": "errors",
    "MeshError": "errors",
    "OptionsError": "errors",
    "PlanError": "errors",
    "RuleError": "errors",
    "SolverError": "errors",
    "VerifyError": "errors",
    "Mesh": "mesh",
    "MeshAxis": "mesh",
    "Invariant": "placement",
    "Partial": "placement",
    "Replicate": "placement",
    "Shard": "placement",
    "Plan": "plan_types",
    "ShardedModule": "runtime.sharded_module",
    "Verification": "verification",
}
_SUBMODULES = ("errors", "rules")


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"autoshard.{name}")
    if home := _HOMES.get(name):
        return getattr(importlib.import_module(f"autoshard.{home}"), name)
    raise AttributeError(f"module 'autoshard' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
