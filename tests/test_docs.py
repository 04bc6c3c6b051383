"""What the README and the manual say is true: code runs, output is what is printed, links lead somewhere."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, blocks, run
from rich.console import Console

import autoshard
from autoshard import cli, errors

README = ROOT / "README.md"
EXAMPLES = ROOT / "examples"


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def has_code(page: Path) -> bool:
    return any(block.language == "python" for block in blocks(page))


# ---- code -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if has_code(p)], ids=page_id)
def test_code_prints_what_the_page_says(page, tmp_path, monkeypatch):
    """`python tests/doc_blocks.py` writes it again where it has changed for a reason."""
    monkeypatch.chdir(tmp_path)
    for block, printed in run(page):
        if block.output is not None:
            assert printed == block.output, f"{page_id(page)}:{block.line}"


def test_the_readme_starts_with_ten_lines_that_run():
    first = next(block for block in blocks(README) if block.language == "python")
    assert len([line for line in first.text.splitlines() if line.strip()]) <= 10


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path, monkeypatch, capsys):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks(README) if block.language == "sh"]
    used = set()
    for line in block.text.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "autoshard"
        assert cli.main(arguments) == 0, f"{line}\n{capsys.readouterr().err}"
        used.add(arguments[0])
    assert used >= {"plan", "show", "explain", "diff", "verify", "hardware"}


def shown(plan: autoshard.Plan) -> str:
    console = Console(file=io.StringIO(), width=100)
    plan.report(console)
    return console.file.getvalue()


@pytest.mark.slow
def test_the_report_in_the_readme_is_a_part_of_the_real_one(tmp_path, monkeypatch):
    """Its words, if not its numbers: those change with every improvement of the cost model."""
    command = re.search(
        r"^    autoshard (plan 'transformers:.*)$", README.read_text("utf-8"), re.MULTILINE
    )
    monkeypatch.chdir(ROOT)
    path = tmp_path / "plan.json"
    assert cli.main([*shlex.split(command[1]), "--json", str(path)]) == 0
    report = shown(autoshard.Plan.load(path))
    (excerpt,) = [b.text for b in blocks(README) if b.language == "text"]
    real = set(re.findall(r"[^\W\d]{3,}[\w.*]*", report))
    assert set(re.findall(r"[^\W\d]{3,}[\w.*]*", excerpt)) <= real
    for line in excerpt.splitlines():
        if match := re.match(r"(\S+\.\S+) ×32 +(column|row|replicated)", line):
            assert re.search(rf"{re.escape(match[1])} ×32 +{match[2]}", report), line


# ---- examples -------------------------------------------------------------------------------


def example(name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *launcher, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_example_custom_operator():
    printed = example("custom_operator.py")
    assert "without a rule: gate replicated, up replicated" in printed
    assert "with a rule:    gate column, up column, down.weight row" in printed
    assert "the sharded model computes what the model does" in printed


@pytest.mark.slow
def test_example_plan_only():
    printed = example("plan_only.py")
    assert "model.layers.*.mlp.down_proj.weight" in printed
    assert "GiB at the peak" in printed
    assert "- hardware: h100-sxm" in printed or "hardware: h100-sxm → l40s-pcie" in printed


LOSS = re.compile(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)")


@pytest.mark.slow
@pytest.mark.gloo
def test_example_train_torchrun(tmp_path):
    """Under torchrun and alone it trains alike, and what it saves has the model's names."""
    torch = pytest.importorskip("torch")
    saved = tmp_path / "weights.pt"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    launched = example("train_torchrun.py", "--steps", "3", "--save", str(saved), launcher=launcher)
    alone = example("train_torchrun.py", "--steps", "3")
    assert len(LOSS.findall(launched)) == 3
    assert LOSS.findall(launched) == LOSS.findall(alone)
    weights = torch.load(saved, weights_only=True)
    assert weights["model.layers.0.mlp.down_proj.weight"].shape == (256, 704)


@pytest.mark.slow
@pytest.mark.gloo
def test_example_demo():
    printed = example("demo.py", "--steps", "3")
    assert "8.03 billion parameters" in printed
    assert "✓ On 4 ranks the sharded model computes what the model does." in printed
    rows = re.findall(r"^ *(\d) +(\d\.\d+) +(\d\.\d+) +(\S+)", printed, re.MULTILINE)
    assert [step for step, *_ in rows] == ["0", "1", "2"]
    assert all(abs(float(whole) - float(sharded)) < 1e-4 for _, whole, sharded, _ in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["factory", "llama_8b"])
def test_example_llama_is_a_source(name, tmp_path, capsys):
    source = f"{EXAMPLES / 'llama.py'}:{name}"
    path = tmp_path / "plan.json"
    assert cli.main(["plan", source, "--world-size", "2", "--json", str(path)]) == 0
    assert autoshard.Plan.load(path).model == "LlamaForCausalLM"
    capsys.readouterr()


# ---- text -----------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(
        r"^#+ (.+)$",
        re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL),
        re.MULTILINE,
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=page_id)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page_id(page)}: {target}"
        assert not anchor or anchor in anchors(file), f"{page_id(page)}: {target}"


@pytest.mark.parametrize("page", [p for p in PAGES if p != README], ids=page_id)
def test_the_readme_leads_to_every_page(page):
    assert f"]({page_id(page)})" in README.read_text("utf-8")


def test_every_error_has_its_section():
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.AutoshardError)
    }
    titles = re.findall(
        r"^## (\w+Error)$", (ROOT / "docs/errors.md").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(titles) == sorted(kinds - {"AutoshardError"})


def test_the_commands_for_a_clone_are_those_that_ci_runs():
    text, makefile = README.read_text("utf-8"), (ROOT / "Makefile").read_text("utf-8")
    named = re.findall(r"^    make (\w+)", text, re.MULTILINE)
    assert named == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)
    assert re.search(r"^make test$", (ROOT / ".ci/run").read_text("utf-8"), re.MULTILINE)


def test_the_conversions_in_the_manual_are_those_of_the_code():
    from autoshard.placement import CONVERSIONS

    words = {"": "nothing", "slice": "slice", "pad": "pad with zeros", "divide": "divide by n"}
    text = (ROOT / "docs/concepts.md").read_text("utf-8")
    rows = re.findall(
        r"^\| ([IRPS]) → ([IRPS])′? \| ([\w -]+) \| ([\w -]+) \|$", text, re.MULTILINE
    )
    found = {(have, want): (forward, backward) for have, want, forward, backward in rows}

    def said(action: str) -> str:
        return words.get(action, action.replace("_", "-"))

    assert found == {
        (have.__name__[0], want.__name__[0]): (said(c.forward), said(c.backward))
        for (have, want), c in CONVERSIONS.items()
    }
