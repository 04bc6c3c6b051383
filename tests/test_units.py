"""Every formula has the dimension that its name says: seconds in, seconds out; bytes in, bytes out.

Sympy formulas are checked symbol by symbol. Plain functions are checked by changing the unit of time: on a
machine whose every time is k times as long and whose every rate a k-th, seconds are k times as many,
and bytes are as many as before. What is not listed here fails.
"""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest
import sympy
import torch
from torch import nn

import autoshard
from autoshard.cost import comm, compute, model
from autoshard.cost.hardware import Hardware, hardware_names, load_hardware
from autoshard.cost.link import KINDS, Link
from autoshard.cost.model import Pricer
from autoshard.graph import TensorMeta
from autoshard.mesh import Mesh
from autoshard.placement import I, P, R, Shard

K = 8.0
T, B, F = sympy.symbols("T B F", positive=True)
DIMENSIONS = {
    "n": 1,
    "bytes": B,
    "alpha": T,
    "beta": T / B,
    "launch": T,
    "eta": 1,
    "flops": F,
    "peak": F / T,
    "bandwidth": B / T,
}
"""Of the symbols of formulas: T a time, B bytes, F operations."""


def dimensions(expression: sympy.Expr) -> set[sympy.Expr]:
    """The dimensions of all summands (and of what a maximum is taken of)."""
    values = {s: (i + 3) * sympy.sympify(DIMENSIONS[str(s)]) for i, s in enumerate(
        sorted(expression.free_symbols, key=str))}  # fmt: skip
    parts = expression.args if isinstance(expression, sympy.Max) else (expression,)
    found = set()
    for part in parts:
        for summand in sympy.Add.make_args(sympy.expand(part.subs(values))):
            found.add(summand.as_independent(T, B, F, as_Add=False)[1])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_collective_formulas_are_seconds(kind: str) -> None:
    assert comm.formulas(kind)
    for name, (expression, source) in comm.formulas(kind).items():
        assert {str(s) for s in expression.free_symbols} <= set(DIMENSIONS), name
        assert dimensions(expression) == {T}, name
        assert source


def test_the_roofline_is_seconds() -> None:
    assert dimensions(compute.roofline_formula()[0]) == {T}


def test_a_formula_of_a_wrong_dimension_is_noticed() -> None:
    size, beta, alpha = sympy.symbols("bytes beta alpha", positive=True)
    assert dimensions(alpha + size) == {T, B}
    assert dimensions(alpha + size / beta) != {T}


# ---- plain functions -------------------------------------------------------------------------

UNCHANGED = {"name", "source", "memory_bytes", "fused_pointwise", "ranks_per_node", "synchronous",
             "matmul_efficiency", "memory_efficiency", "efficiencies", "in_switch_reduction",
             "in_switch_efficiency", "topology", "measured", "allocator_slack"}  # fmt: skip


def slowed(profile: Hardware | Link, by: float) -> Hardware | Link:
    """The same machine, told in another unit of time; every field is a rate, a time, or listed."""
    changed = {}
    for field in dataclasses.fields(profile):
        name, value = field.name, getattr(profile, field.name)
        if name in UNCHANGED or value is None:
            continue
        if isinstance(value, Link):
            changed[name] = slowed(value, by)
        elif name.endswith(("_bytes_s", "_flops")):
            changed[name] = _each(value, 1 / by)
        elif name.endswith("_s"):
            changed[name] = _each(value, by)
        else:
            raise AssertionError(f"Is '{name}' a time or a rate? Say so here.")
    return dataclasses.replace(profile, **changed)


def _each(value, by: float):
    return tuple((key, n * by) for key, n in value) if isinstance(value, tuple) else value * by


H, W = load_hardware("h100-sxm"), TensorMeta((64, 128), "float32", True)
CPU = load_hardware("cpu-gloo")


def pricer(hardware: Hardware) -> Pricer:
    return Pricer(hardware, Mesh.of({"tp": 4}), train=True)


def converted(hardware: Hardware) -> float:
    pairs = [((I,), (R,)), ((Shard(0),), (R,)), ((P,), (Shard(1),)), ((Shard(0),), (Shard(1),))]
    return sum(s.time_s for have, want in pairs for s in pricer(hardware).conversion(W, have, want))


SECONDS = {
    "comm.collective_s": lambda h: sum(
        comm.collective_s(kind, size, 4, h.intra) for kind in KINDS for size in (1e3, 1e9)
    ),
    "comm.copy_s": lambda h: comm.copy_s(1e3, h) + comm.copy_s(1e9, h),
    "compute.roofline_s": lambda h: sum(
        compute.roofline_s(f, b, "bfloat16", h) for f, b in ((1e3, 1e3), (1e13, 1e3), (1e3, 1e11))
    ),
    "model.Pricer.optimizer_s": lambda h: pricer(h).optimizer_s(W, (I,)),
    "model.Pricer.conversion": converted,
}
BYTES = {
    "model.Pricer.local_bytes": lambda meta: pricer(H).local_bytes(meta, (Shard(0),)),
    "model.Pricer.weight_bytes": lambda meta: sum(pricer(H).weight_bytes(meta, (Shard(0),))),
    "model.Pricer.update_bytes": lambda meta: pricer(H).update_bytes(meta, (Shard(0),)),
}
THROUGH_PLANS = {"model.Pricer.op_s"}
"""Checked on whole plans, below."""


def told_units() -> set[str]:
    """The functions and methods of the cost model whose names say a unit."""
    found = set()
    for module in (comm, compute, model):
        short = module.__name__.rpartition(".")[2]
        owners = [(short, module), *(
            (f"{short}.{name}", cls) for name, cls in inspect.getmembers(module, inspect.isclass)
            if cls.__module__ == module.__name__
        )]  # fmt: skip
        for prefix, owner in owners:
            for name, function in inspect.getmembers(owner, inspect.isfunction):
                ours = function.__module__ == module.__name__ and not name.startswith("_")
                if ours and name.endswith(("_s", "_bytes", "_flops")):
                    found.add(f"{prefix}.{name}")
    return found


def test_every_function_that_says_a_unit_is_checked() -> None:
    assert told_units() - set(SECONDS) - set(BYTES) - THROUGH_PLANS == set()


@pytest.mark.parametrize("hardware", [H, CPU], ids=["accelerator", "cpu"])
@pytest.mark.parametrize("name", SECONDS)
def test_seconds_are_seconds(name: str, hardware: Hardware) -> None:
    once = SECONDS[name](hardware)
    assert once > 0
    assert SECONDS[name](slowed(hardware, K)) == pytest.approx(K * once, rel=1e-12)


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_bytes(name: str) -> None:
    """Twice the elements are twice the bytes, whatever the machine."""
    once = BYTES[name](W)
    assert once > 0
    assert BYTES[name](dataclasses.replace(W, shape=(128, 128))) == 2 * once


class Net(nn.Module):
    """Products, attention, norms, lookups, reductions: every family that is priced in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.qkv, self.head = nn.Linear(32, 96), nn.Linear(32, 64)

    def forward(self, ids, labels):
        x = self.norm(self.embed(ids))
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = torch.softmax(nn.functional.gelu(x), -1) * x.mean(1, keepdim=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("name", [name for name in hardware_names() if name != "ideal"])
def test_a_plan_on_a_machine_told_in_another_unit_is_the_same_plan(name: str) -> None:
    with torch.device("meta"):
        net, ids = Net(), torch.zeros(8, 16, dtype=torch.long)
    here = load_hardware(name)
    one, other = (
        autoshard.plan(net, 4, (ids, ids), hardware=h, search="all")
        for h in (here, slowed(here, K))
    )
    assert one.choices == other.choices
    assert other.cost.compute_s == pytest.approx(K * one.cost.compute_s, rel=1e-9)
    assert other.cost.comm_s == pytest.approx(K * one.cost.comm_s, rel=1e-9)
    assert other.cost.memory == one.cost.memory
    assert math.isclose(other.sensitivity().at(), K * one.sensitivity().at(), rel_tol=1e-9)
