"""The shape of the tree: what may import what, and how long a file may grow."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autoshard"
COMPAT = PACKAGE / "compat.py"
CLI = PACKAGE / "cli.py"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_LINES = 400
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}
# Each takes a good part of the 0.5 s that `autoshard show` may take to start.
NOT_AT_START = ("torch", "transformers", "sympy", "networkx", "pulp", "highspy", "numpy")


def dotted_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every dotted name that a file spells out, with its line, import aliases resolved.

    Yields `torch.fx.node` for `import torch.fx.node`, `torch.fx.Node` for `from torch.fx import
    Node`, `torch.distributed.rpc` for `dist.rpc` where `dist` is `torch.distributed`, and whole
    strings that look like a dotted name, as `importlib.import_module` takes.
    """
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.partition(".")[0]
                aliases[name.asname or top] = name.name if name.asname else top
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
                yield node.lineno, f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = attribute_chain(node)
            if chain and chain[0] in aliases:
                yield node.lineno, ".".join([aliases[chain[0]], *chain[1:]])
        elif isinstance(node, ast.Call) and is_getattr_of_literal(node):
            chain = attribute_chain(node.args[0])
            if chain and chain[0] in aliases:
                attribute = ast.literal_eval(node.args[1])
                yield node.lineno, ".".join([aliases[chain[0]], *chain[1:], attribute])
        elif isinstance(node, ast.Constant) and is_dotted_name(node.value):
            yield node.lineno, str(node.value)


def attribute_chain(node: ast.expr) -> list[str] | None:
    """`["a", "b", "c"]` for `a.b.c`; None where the expression is anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else None


def is_dotted_name(value: object) -> bool:
    """Whether a constant is a string like `torch.fx.node`."""
    return isinstance(value, str) and re.fullmatch(r"\w+(\.\w+)+", value) is not None


def is_getattr_of_literal(node: ast.Call) -> bool:
    """Whether a call is `getattr(…, "a literal name", …)`."""
    return (
        isinstance(node.func, ast.Name)
        and node.func.id in {"getattr", "setattr", "hasattr"}
        and len(node.args) >= 2
        and isinstance(node.args[1], ast.Constant)
        and isinstance(node.args[1].value, str)
    )


def is_torch_internal(name: str) -> bool:
    """Whether a dotted name goes through a private part of torch."""
    parts = name.split(".")
    private = (p.startswith("_") and not p.endswith("__") for p in parts[1:])
    return parts[0] == "torch" and any(private)


def names_in(path: Path) -> list[tuple[int, str]]:
    """`dotted_names` of a file."""
    return list(dotted_names(ast.parse(path.read_text(encoding="utf-8"))))


def places(path: Path, found: list[tuple[int, str]]) -> str:
    """`autoshard/x.py:12 name` a line, for a message."""
    return "\n".join(f"{path.relative_to(ROOT)}:{line} {name}" for line, name in found)


def each_file(*, but: tuple[Path, ...] = ()) -> pytest.MarkDecorator:
    """Parametrise a test over the files of the package."""
    paths = [p for p in FILES if p not in but]
    return pytest.mark.parametrize(
        "path", paths, ids=[p.relative_to(ROOT).as_posix() for p in paths]
    )


@pytest.mark.parametrize(
    ("source", "internal"),
    [
        ("import torch._dynamo", True),
        ("import torch.utils._pytree as pytree", True),
        ("from torch._subclasses import FakeTensorMode", True),
        ("from torch.distributed.tensor.placement_types import _StridedShard", True),
        ("import torch.distributed as dist\ndist._functional_collectives", True),
        ("import torch\nx = torch._C._foo()", True),
        ("import torch\nx = getattr(torch, '_inductor')", True),
        ("m = 'torch._higher_order_ops.wrap'", True),
        ("import torch\ntorch.__version__", False),
        ("from torch import nn\nnn.functional.linear", False),
        ("from torch.distributed.tensor import DTensor", False),
    ],
)
def test_torch_internals_are_recognised(source: str, internal: bool) -> None:
    names = [name for _, name in dotted_names(ast.parse(source))]
    assert any(is_torch_internal(name) for name in names) is internal


def test_the_version_is_the_same_in_both_places() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert importlib.import_module("autoshard").__version__ == project["version"]


@each_file()
def test_files_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines < MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines; split it by purpose"


@each_file(but=(COMPAT,))
def test_torch_internals_only_in_compat(path: Path) -> None:
    found = [(line, name) for line, name in names_in(path) if is_torch_internal(name)]
    assert not found, "go through autoshard/compat.py:\n" + places(path, found)


@each_file(but=(CLI,))
def test_the_environment_is_read_only_by_the_command_line(path: Path) -> None:
    readers = ("os.environ", "os.environb", "os.getenv", "os.getenvb")
    found = [
        (line, name)
        for line, name in names_in(path)
        if any(name == reader or name.startswith(f"{reader}.") for reader in readers)
    ]
    assert not found, "pass it as an argument:\n" + places(path, found)


@each_file()
def test_nothing_is_pickled(path: Path) -> None:
    found = [(line, name) for line, name in names_in(path) if name.split(".")[0] in PICKLES]
    assert not found, "a file that is unpickled can run anything:\n" + places(path, found)


def torch_internals() -> tuple[str, ...]:
    """`TORCH_INTERNALS` of compat: the dotted names of torch's private parts that it uses."""
    if not COMPAT.exists():
        pytest.skip("autoshard/compat.py is not written yet")
    return importlib.import_module("autoshard.compat").TORCH_INTERNALS


def resolve(name: str) -> object:
    """The object of a dotted name: the longest prefix that is a module, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def is_part_of_other(a: str, b: str) -> bool:
    """Whether one dotted name is the other or leads to it."""
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def test_compat_lists_the_internals_it_uses() -> None:
    listed = torch_internals()
    missing = [
        (line, name)
        for line, name in names_in(COMPAT)
        if is_torch_internal(name) and not any(is_part_of_other(name, entry) for entry in listed)
    ]
    assert not missing, "add to TORCH_INTERNALS:\n" + places(COMPAT, missing)
    assert sorted(set(listed)) == sorted(listed), "TORCH_INTERNALS names one twice"


def test_every_listed_internal_of_torch_exists() -> None:
    gone = []
    for name in torch_internals():
        assert is_torch_internal(name), f"{name} is no internal of torch"
        try:
            resolve(name)
        except (ImportError, AttributeError):
            gone.append(name)
    assert not gone, f"this torch has no {', '.join(gone)}"


@pytest.mark.parametrize("module", ["autoshard", "autoshard.cli", "autoshard.plan_json"])
def test_starting_up_imports_nothing_heavy(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    code = f"import sys, {module}; print(*(m for m in {NOT_AT_START} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"import {module} imports {done.stdout}"


def test_tests_run_on_one_thread() -> None:
    torch = pytest.importorskip("torch")
    assert torch.get_num_threads() == 1
