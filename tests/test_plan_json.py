"""A plan's JSON: what is written is read back; what is damaged is refused with a readable message."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from sample_plans import PLANS, llama_plan, mesh_plan, slow_plan

from autoshard.cost.optimizer import Optimizer
from autoshard.errors import PlanError
from autoshard.plan_json import _fields
from autoshard.plan_types import (
    Choice,
    CollectiveRecord,
    Cost,
    CostTerm,
    FallbackRecord,
    Memory,
    Plan,
    SolverRecord,
    WeightRecord,
)

SCHEMA = json.loads(
    resources.files("autoshard").joinpath("schema/plan.schema.json").read_text("utf-8")
)


def document(plan: Plan) -> dict[str, Any]:
    return json.loads(plan.to_json())


def refusal(text: str) -> PlanError:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    return caught.value


# ---- writing and reading back ---------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_what_is_written_is_read_back(name):
    plan = PLANS[name]()
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert text.endswith("}\n")


def test_wall_time_is_no_part_of_a_plan():
    plan = llama_plan()
    slower = dataclasses.replace(plan, solver=dataclasses.replace(plan.solver, wall_s=99.0))
    assert slower == plan
    assert slower.to_json() == plan.to_json()
    assert Plan.from_json(plan.to_json()).solver.wall_s == 0


def test_equal_plans_have_equal_bytes_whatever_the_order_of_mappings_and_the_hash_seed():
    plan = llama_plan()
    backwards = dict(reversed(plan.cost.baselines.items()))
    cost = dataclasses.replace(plan.cost, baselines=backwards)
    assert dataclasses.replace(plan, cost=cost).to_json() == plan.to_json()
    program = "from sample_plans import llama_plan; print(llama_plan().to_json(), end='')"
    for seed in ("1", "2"):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(Path(__file__).parent),
        }
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
        assert run.stdout.decode() == plan.to_json()


def test_floats_keep_every_bit_and_a_bound_may_be_missing():
    plan = dataclasses.replace(
        slow_plan(), cost=dataclasses.replace(slow_plan().cost, compute_s=0.1 + 0.2, comm_s=5)
    )
    again = Plan.from_json(plan.to_json())
    assert again.cost.compute_s == 0.30000000000000004
    assert isinstance(again.cost.comm_s, float)
    assert again.solver.bound_s == -math.inf


def test_a_record_is_a_line():
    lines = llama_plan().to_json().splitlines()
    assert sum('"fqns"' in line for line in lines) == len(llama_plan().weights)


# ---- the schema -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_output_is_valid_by_the_schema(name):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(document(PLANS[name]()))


def test_the_schema_has_exactly_the_fields_of_the_records_and_describes_each():
    records = {
        "weight": WeightRecord,
        "collective": CollectiveRecord,
        "fallback": FallbackRecord,
        "memory": Memory,
        "optimizer": Optimizer,
        "cost": Cost,
        "solver": SolverRecord,
        "choice": Choice,
        "term": CostTerm,
    }
    parts = {name: SCHEMA["$defs"][name] for name in records}
    for name, kind in records.items():
        assert list(parts[name]["properties"]) == list(_fields(kind)), name
    assert list(SCHEMA["properties"]) == ["schema", "version", *_fields(Plan)]
    for name, part in {**parts, "plan": SCHEMA, "axis": SCHEMA["$defs"]["axis"]}.items():
        assert part["required"] == list(part["properties"]), name
        assert part["additionalProperties"] is False, name
        for field, about in part["properties"].items():
            assert "description" in about or about in NOUNS, (name, field)


NOUNS = ({"$ref": "#/$defs/memory"}, {"$ref": "#/$defs/optimizer"})


@pytest.mark.parametrize("field", ["mode", "weights", "cost"])
def test_the_schema_refuses_what_the_reader_refuses(field):
    broken = document(llama_plan())
    del broken[field]
    assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(broken)


def test_the_example_of_the_manual_is_a_plan():
    manual = Path(__file__).parents[1] / "docs" / "plan-format.md"
    (example,) = re.findall(r"```json\n(.*?)```", manual.read_text("utf-8"), re.DOTALL)
    assert Plan.from_json(example).to_json() == example


# ---- what is refused ------------------------------------------------------------------------


def test_a_truncated_plan_is_refused_wherever_it_ends():
    text = slow_plan().to_json()
    end = len(text.rstrip())
    for at in range(1, end):
        error = refusal(text[:at])
        line = text[:at].rstrip().count("\n") + 1
        assert error.what == f"The plan is cut short: it ends in the middle of line {line}.", at
        assert "autoshard plan SOURCE --json" in error.fix


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("", "The plan is empty.", ""),
        (" \n", "The plan is empty.", ""),
        ("hello", "The text is not JSON: Expecting value.", "line 1, column 1"),
        ('{"a": 1,}', "The text is not JSON: ", "line 1, column "),
        ('{"a": NaN}', "The text is not JSON: NaN is no JSON number.", ""),
        ('{"a": 1, "a": 2}', "The text is not JSON: a field 'a' is there twice.", ""),
        ("[" * 100_000 + "]" * 100_000, "The text is not JSON: ", ""),
        ("9" * 5000, "The text is not JSON: ", ""),
        ("[1, 2]", "The text is JSON, but not an autoshard plan.", ""),
        ('{"model": "x"}', "The text is JSON, but not an autoshard plan.", ""),
        ("null", "The text is JSON, but not an autoshard plan.", ""),
    ],
)
def test_what_is_no_plan_is_refused(text, what, where):
    error = refusal(text)
    assert error.what.startswith(what)
    assert error.where.startswith(where)


@pytest.mark.parametrize(
    ("version", "fix"),
    [(4, "Upgrade autoshard."), (2, "Make the plan again"), (1, "Make the plan again"), ("2", "Make the plan again"),
     (True, "Make the plan again"), (None, "Make the plan again")],
)  # fmt: skip
def test_an_unknown_version_is_refused(version, fix):
    error = refusal(json.dumps(document(llama_plan()) | {"version": version, "surprise": 1}))
    assert error.what == (f"The plan has version {json.dumps(version)}; this autoshard reads 3.")
    assert error.fix.startswith(fix)


@pytest.mark.parametrize(
    "text", ["", "1.0 memory 1", "x memory 1 1", "1.0 colour 0 0", "1.0 memory b 0"]
)
def test_a_damaged_part_of_a_time_is_refused(text):
    plan = document(llama_plan())
    plan["cost"]["terms"][0]["options"][0][0] = text
    error = refusal(json.dumps(plan))
    assert error.what == f"'{text}' is no part of a time."
    assert error.where == "cost.terms[0].options[0][0]"


def paths(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every member of a document."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, dict | list):
            found += paths(inner, (*path, key))
        else:
            found.append((*path, key))
    return found


def at(root: Any, path: tuple) -> Any:
    for key in path:
        root = root[key]
    return root


def written(path: tuple) -> str:
    """A path as errors write it: weights[3].shape."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


@pytest.mark.parametrize("plan", [slow_plan(), mesh_plan()], ids=["slow", "mesh"])
def test_every_missing_or_mistyped_field_is_named(plan):
    full = document(plan)
    for path in paths(full):
        if path[0] in ("schema", "version"):
            continue
        parent, key = path[:-1], path[-1]
        if isinstance(key, str) and parent[-1:] != ("baselines",):
            broken = document(plan)
            del at(broken, parent)[key]
            error = refusal(json.dumps(broken))
            assert (error.what, error.where) == (f"The plan has no field '{key}'.", written(path))
        broken = document(plan)
        at(broken, parent)[key] = {"mis": "typed"}
        error = refusal(json.dumps(broken))
        assert error.where.startswith(written(path))
    for path in [(), ("weights", 0), ("cost", "memory"), ("mesh", 0), ("solver",)]:
        broken = document(plan)
        at(broken, path)["colour"] = "red"
        error = refusal(json.dumps(broken))
        assert error.what == "The plan has an unknown field 'colour'."
        assert error.where == written((*path, "colour"))


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        (("weights", 1, "shape"), "8", 'A field holds "8" where a list is wanted.'),
        (("weights", 1, "shape", 0), 8.5, "A field holds 8.5 where a whole number is wanted."),
        (("weights", 1, "shape", 0), True, "A field holds true where a whole number is wanted."),
        (("weights", 1, "trainable"), 1, "A field holds 1 where true or false is wanted."),
        (("weights", 1, "reason"), None, "A field holds null where text is wanted."),
        (("weights", 1, "placements", 0), "Q", "'Q' is not a placement."),
        (("weights", 1, "placements", 0), "P", "A weight of shape [8] cannot be stored as P."),
        (("weights", 1, "placements", 0), "S(1)", "A weight of shape [8] cannot be stored as S(1)."),
        (("weights", 1, "placements"), ["I", "I"], "A weight has 2 placements on a mesh of 1 axes"),
        (("weights", 1, "fqns"), [], "A weight has no name."),
        (("mesh",), [], "A mesh needs at least one axis."),
        (("mesh", 0, "size"), 0, "Mesh axis 'tp' has size 0."),
        (("cost", "compute_s"), "1", 'A field holds "1" where a number is wanted.'),
        (("cost", "compute_s"), 10**400, "A number is too large."),
        (("mode",), "fly", "'fly' is no mode."),
        (("constraints",), [["a"]], 'A field holds ["a"] where a list of 2 is wanted.'),
        (("search",), "", "'' is no search."),
        (("collectives", 0, "phase"), "x", "'x' is no phase."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_path(path, value, what):
    broken = document(slow_plan())
    at(broken, path[:-1])[path[-1]] = value
    error = refusal(json.dumps(broken))
    assert error.what.startswith(what)
    assert written(path).startswith(error.where.partition("[0]")[0])
    assert error.fix


# ---- files ----------------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    path = tmp_path / "plan.json"
    llama_plan().save(path)
    assert Plan.load(path) == llama_plan()
    assert Plan.load(str(path)) == llama_plan()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as some editors save it
    assert Plan.load(path) == llama_plan()


def test_save_replaces_whole_files_and_keeps_links_and_permissions(tmp_path):
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    slow_plan().save(link)
    assert link.is_symlink()
    assert Plan.load(path) == slow_plan()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_a_save_that_fails_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanError, match="cannot be written: No space left on device"):
        slow_plan().save(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_text_that_utf_8_has_no_bytes_for_is_saved_too(tmp_path):
    plan = dataclasses.replace(slow_plan(), notes=("\ud800",))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_files_that_cannot_be_read_or_written(tmp_path):
    def load_error(path: Path) -> PlanError:
        with pytest.raises(PlanError) as caught:
            Plan.load(path)
        assert str(path) in caught.value.where
        return caught.value

    assert load_error(tmp_path / "none.json").what == "There is no such file."
    assert load_error(tmp_path).what == "A folder is no plan."
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"{\xff\xfe")
    assert load_error(binary).what == "The file is not text: byte 1 is not UTF-8."
    broken = tmp_path / "broken.json"
    broken.write_text(slow_plan().to_json()[:300])
    assert "cut short" in load_error(broken).what
    wrong = document(slow_plan())
    wrong["weights"][2]["shape"] = None
    broken.write_text(json.dumps(wrong))
    assert load_error(broken).where == f"{broken}, at weights[2].shape"
    for place in (tmp_path, tmp_path / "none" / "plan.json"):
        with pytest.raises(PlanError, match="The plan cannot be written"):
            slow_plan().save(place)
