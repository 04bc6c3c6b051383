"""The command line: exit status, what is on stdout and on stderr, and how fast it starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sample_plans import llama_plan, mesh_plan, slow_plan

from autoshard import cli
from autoshard.errors import InfeasibleError, VerifyError
from autoshard.plan_types import Plan
from autoshard.verification import Verification

MODEL = """\
import os
import sys
import torch
from torch import nn

def build():
    print("a model that talks")
    os.write(1, b"and so does its library")
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (torch.ones(4, 8),)

def broken():
    return undefined_name
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with three plans and a model's file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, plan in (("llama", llama_plan()), ("slow", slow_plan()), ("mesh", mesh_plan())):
        plan.save(f"{name}.json")
    Path("m.py").write_text(MODEL)
    return tmp_path


def autoshard(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "autoshard", *arguments],
        capture_output=True, encoding="utf-8", timeout=120, **options,
    )  # fmt: skip


def status(*arguments: str) -> int:
    """Run the command in this process: for what needs no process of its own."""
    return cli.main(arguments)


# ---- show, explain, diff, hardware: without torch ---------------------------------------------


def test_show_starts_at_once_and_imports_no_torch(folder):
    program = (
        "import sys; from autoshard.cli import main; status = main(['show', 'llama.json']); "
        "heavy = {'torch', 'sympy', 'networkx', 'pulp', 'highspy', 'numpy', 'transformers'}; "
        "sys.exit(status or ', '.join(heavy & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8")
    assert run.returncode == 0, run.stderr
    assert "model.layers.*.mlp.down_proj.weight ×32" in run.stdout
    took = []
    for _ in range(3):
        start = time.perf_counter()
        assert autoshard("show", "llama.json").returncode == 0
        took.append(time.perf_counter() - start)
    assert min(took) < 0.5


def test_show_prints_the_report_and_nothing_else(folder):
    run = autoshard("show", "llama.json")
    assert (run.returncode, run.stderr) == (0, "")
    assert "autoshard plan" in run.stdout
    assert "\x1b" not in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 100


def test_show_where_the_terminal_knows_ascii_alone(folder):
    run = autoshard("show", "llama.json", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (run.returncode, run.stderr) == (0, "")
    assert "model.layers.*.mlp.down_proj.weight" in run.stdout


def test_show_into_a_pipe_that_closes_is_no_error(folder):
    command = f"{sys.executable} -m autoshard show llama.json | head -1; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, encoding="utf-8")
    assert run.stderr == ""


def test_explain(folder, capsys):
    assert status("explain", "llama.json", "lm_head.weight") == 0
    assert capsys.readouterr().out == llama_plan().explain("lm_head.weight")


def test_diff(folder, capsys):
    assert status("diff", "llama.json", "llama.json", "--exit-code") == 0
    assert capsys.readouterr().out == ""
    assert status("diff", "llama.json", "mesh.json") == 0
    assert capsys.readouterr().out == llama_plan().diff(mesh_plan())
    assert status("diff", "--exit-code", "llama.json", "mesh.json") == 1


def test_hardware(folder):
    run = autoshard("hardware")
    assert (run.returncode, run.stderr) == (0, "")
    for name in ("h100-sxm", "a100-sxm", "ideal"):
        assert re.search(rf"^{name} ", run.stdout, re.MULTILINE)
    one = autoshard("hardware", "h100-sxm")
    assert (one.returncode, one.stderr) == (0, "")
    assert "datasheet" in one.stdout


def test_version_and_help():
    assert autoshard("--version").stdout.startswith("autoshard ")
    shown = autoshard("--help").stdout
    for command in ("plan", "show", "explain", "diff", "verify", "hardware"):
        assert re.search(rf"^    {command} ", shown, re.MULTILINE)
    assert "transformers:CONFIG.json?batch=4&seq=2048" in autoshard("plan", "--help").stdout


# ---- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("show none.json", "There is no such file.\n  where: none.json"),
        ("show .", "A folder is no plan.\n  where: ."),
        ("show cut.json", "The plan is cut short: it ends in the middle of line 21."),
        ("show m.py", "The text is not JSON: Expecting value.\n  where: m.py, at line 1, column 1"),
        ("show foreign.json", "The text is JSON, but not an autoshard plan."),
        ("show newer.json", "The plan has version 4; this autoshard reads 3."),
        ("explain llama.json lm_head", "The plan has no weight 'lm_head'."),
        ("diff llama.json none.json", "There is no such file.\n  where: none.json"),
        ("hardware h100", "There is no hardware profile 'h100'."),
        ("plan m.py:build", "How many ranks?\n  fix:   Give --world-size 8, or --mesh"),
        ("plan m.py:build --mesh tp", "'tp' is not a mesh.\n  fix:   Write dp=2,tp=4."),
        ("plan m.py:build --world-size 2 --constraint x", "'x' is no constraint."),
        ("plan m.py:build --world-size 2 --json no/x.json", "The file to save to is in a folder"),
        ("plan m.py:build --world-size 2 --json .", "The file to save to is a folder."),
        ("plan none.py:x --world-size 2", "The model's file does not exist.\n  where: none.py"),
        ("plan m.py --world-size 2", "'m.py' names no model."),
        ("plan m.py:broken --world-size 2", "'m.py:broken' raised an error: NameError"),
        ("plan transformers:none.json --world-size 2", "There is no such config file."),
        ("plan m.py:build --world-size 0", "Mesh axis 'tp' has size 0."),
        ("plan m.py:build --world-size 2 --hardware h100", "There is no hardware profile 'h100'."),
        ("plan m.py:build --world-size 2 --memory-budget 24x", ""),
        ("plan m.py:build --world-size 2 --constraint 'zzz*=row'", ""),
        ("verify m.py:build --plan none.json", "There is no such file.\n  where: none.json"),
    ],
)
def test_bad_input_is_one_readable_message_and_exit_2(folder, capsys, command, message):
    text = llama_plan().to_json()
    Path("cut.json").write_text("\n".join(text.split("\n")[:21])[:-3])
    Path("foreign.json").write_text("[]")
    Path("newer.json").write_text(json.dumps(json.loads(text) | {"version": 4}))
    assert status(*[word.strip("'") for word in command.split()]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"autoshard: error: {message}")
    assert "Traceback" not in shown.err
    assert shown.err.count("autoshard: error:") == 1


def test_the_users_line_is_named(folder, capsys):
    assert status("plan", "m.py:broken", "--world-size", "2") == 2
    error = capsys.readouterr().err
    assert f"where: {folder / 'm.py'}, line 12, in broken: return undefined_name" in error


@pytest.mark.parametrize("arguments", [(), ("fly",), ("plan",), ("show",), ("show", "a", "b")])
def test_unknown_arguments_are_exit_2(arguments):
    run = autoshard(*arguments)
    assert run.returncode == 2
    assert run.stderr.startswith("usage: autoshard")


# ---- plan and verify ------------------------------------------------------------------------


def test_plan_writes_json_alone_to_stdout(folder):
    arguments = ("plan", "m.py:build", "--world-size", "2", "--hardware", "ideal")
    run = autoshard(*arguments, "--json", "-")
    assert run.returncode == 0, run.stderr
    plan = Plan.from_json(run.stdout)
    assert run.stdout == plan.to_json()
    assert [weight.fqn for weight in plan.weights] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for text in ("a model that talks", "and so does its library", "autoshard plan", "Solver"):
        assert text in run.stderr
    saved = autoshard(*arguments, "--json", "plan.json")
    assert (saved.returncode, saved.stderr) == (0, "The plan is saved in plan.json.\n")
    assert Path("plan.json").read_text("utf-8") == run.stdout
    assert "autoshard plan" in saved.stdout


def test_plan_of_a_transformers_config(folder, capsys):
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64,
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(config))
    source = "transformers:config.json?batch=2&seq=8"
    assert status("plan", source, "--world-size", "2", "--json", "llama.plan.json") == 0
    plan = Plan.load("llama.plan.json")
    assert plan.model == "LlamaForCausalLM"
    assert plan.inputs == ("input_ids int64[2, 8]", "labels int64[2, 8]")
    assert "×2" in capsys.readouterr().out


def test_every_option_reaches_the_api(folder, monkeypatch):
    asked = {}

    def plan(model, **options):
        asked.update(options)
        return llama_plan()

    monkeypatch.setattr("autoshard.api.plan", plan)
    command = (
        "plan m.py:build --mesh dp=2,tp=4 --hardware ideal --memory-budget 24GiB --infer "
        "--search all --constraint *.weight=column --constraint 2.*=shard(0) --solver CBC "
        "--time-limit 5 --no-uniform"
    )
    assert status(*command.split()) == 0
    assert str(asked.pop("mesh")) == "dp=2,tp=4"
    assert [tuple(x.shape) for x in asked.pop("args")] == [(4, 8)]
    assert callable(asked.pop("progress"))
    assert asked == {
        "kwargs": {},
        "hardware": "ideal",
        "memory_budget": "24GiB",
        "mode": "infer",
        "search": "all",
        "constraints": {"*.weight": "column", "2.*": "shard(0)"},
        "solver": "CBC",
        "time_limit_s": 5.0,
        "uniform": False,
    }
    asked.clear()
    assert status("plan", "m.py:build", "--world-size", "8") == 0
    assert asked.keys() == {"args", "kwargs", "progress", "world_size"}


def test_verify(folder, capsys):
    assert status("verify", "m.py:build", "--world-size", "2", "--hardware", "ideal") == 0
    assert "✓ On 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Verification(True, 0.0, 0.0, 0.0), 0),
        (Verification(False, 1.0, 1.0, 1.0), 1),
        (VerifyError("Ranks disagree."), 1),
        (InfeasibleError("No plan fits."), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_status_of_verify(folder, monkeypatch, capsys, outcome, expected):
    def verify(model, **options):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr("autoshard.api.verify", verify)
    assert status("verify", "m.py:build", "--world-size", "2") == expected
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupt_is_exit_130_without_a_traceback(folder):
    Path("slow.py").write_text(
        "import time\ndef build():\n    print('here', flush=True)\n    time.sleep(60)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "autoshard", "plan", "slow.py:build", "--world-size", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline() == "here\n"
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=30)
    assert (run.returncode, errors) == (130, "autoshard: interrupted\n")


def test_a_failing_save_loses_nothing(folder, capsys):
    Path("plan.json").write_text("precious")
    assert status("plan", "m.py:broken", "--world-size", "2", "--json", "plan.json") == 2
    assert Path("plan.json").read_text() == "precious"
