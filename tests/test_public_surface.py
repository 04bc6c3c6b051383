"""The names users import, frozen: adding one is a decision, and losing one is a breaking change."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import subprocess
import sys

import pytest

import autoshard

NAMES = {
    "autoshard": "function",
    "plan": "function",
    "verify": "function",
    "ShardedModule": "class",
    "Plan": "class",
    "Verification": "class",
    "Mesh": "class",
    "MeshAxis": "class",
    "Hardware": "class",
    "Optimizer": "class",
    "Invariant": "class",
    "Replicate": "class",
    "Partial": "class",
    "Shard": "class",
    "AutoshardError": "class",
    "CalibrationError": "class",
    "CaptureError": "class",
    "ConstraintError": "class",
    "InfeasibleError": "class",
    "MeshError": "class",
    "OptionsError": "class",
    "PlanError": "class",
    "RuleError": "class",
    "SolverError": "class",
    "VerifyError": "class",
    "errors": "module",
    "rules": "module",
    "__version__": "str",
}
INPUT = ("CaptureError", "ConstraintError", "InfeasibleError", "MeshError", "OptionsError",
         "PlanError", "RuleError")  # fmt: skip
ENVIRONMENT = ("CalibrationError", "SolverError", "VerifyError")
PLAN_METHODS = {"to_json", "from_json", "save", "load", "report", "explain", "diff"}


def test_the_names_are_these():
    assert set(autoshard.__all__) == set(NAMES)
    assert sorted(autoshard.__all__) == list(autoshard.__all__)
    assert dir(autoshard) == sorted(NAMES)


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_every_name_can_be_imported_and_is_what_it_should_be(name, kind):
    found = getattr(autoshard, name)
    assert (type(found).__name__ if kind in ("function", "module", "str") else "class") == kind
    assert (kind == "class") == isinstance(found, type)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'autoshard' has no attribute 'shard'"):
        _ = autoshard.shard  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_the_package_imports_none_of_what_is_heavy():
    program = (
        "import sys, autoshard\n"
        "from autoshard import Mesh, Plan, PlanError, Shard, Verification, errors\n"
        "heavy = {'torch', 'sympy', 'networkx', 'pulp', 'highspy', 'rich', 'numpy'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_no_submodule_takes_the_name_of_a_function():
    """Importing a submodule sets an attribute of its name on the package, over the function."""
    submodules = {module.name for module in pkgutil.iter_modules(autoshard.__path__)}
    assert not submodules & {name for name, kind in NAMES.items() if kind != "module"}


def test_the_functions_stay_functions_whatever_has_been_imported():
    for module in pkgutil.walk_packages(autoshard.__path__, "autoshard."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    from autoshard import plan

    assert callable(plan)
    assert callable(autoshard.autoshard)
    assert callable(autoshard.verify)
    assert autoshard.plan is plan


def test_what_kind_of_error_each_is():
    for name in INPUT:
        assert issubclass(getattr(autoshard, name), ValueError)
    for name in ENVIRONMENT:
        assert issubclass(getattr(autoshard, name), RuntimeError)
    for name in (*INPUT, *ENVIRONMENT):
        error = getattr(autoshard, name)("What.", "here", "do that")
        assert isinstance(error, autoshard.AutoshardError)
        assert str(error) == "What.\n  where: here\n  fix:   do that"
        assert (error.what, error.where, error.fix) == ("What.", "here", "do that")


def test_the_records_of_a_plan_have_the_fields_that_are_promised():
    from autoshard import plan_types as types

    promised = {
        types.WeightRecord: "fqn shape dtype split placements local_shape stored_bytes reason",
        types.CollectiveRecord: "kind axis phase tensor_shape bytes count time_s module op reason",
        types.Cost: "compute_s comm_s step_s memory baselines",
        types.Memory: "weights_bytes gradients_bytes optimizer_bytes activations_bytes "
        "transient_bytes peak_bytes",
        types.SolverRecord: "name status objective_s bound_s gap binaries constraints wall_s",
        autoshard.Plan: "weights collectives cost solver fallbacks",
        autoshard.Verification: "ok max_output_error max_gradient_error max_update_error "
        "gradients first_divergence",
    }
    for kind, names in promised.items():
        have = {field.name for field in dataclasses.fields(kind)} | set(dir(kind))
        assert set(names.split()) <= have, kind
        assert kind.__dataclass_params__.frozen, kind  # pyright: ignore[reportAttributeAccessIssue]
    assert set(dir(autoshard.Plan)) >= PLAN_METHODS
    assert hasattr(autoshard.Verification, "report")
