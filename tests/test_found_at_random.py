"""Faults that random programs have shown, each shrunk to its pattern and held to many placements."""

from __future__ import annotations

import pytest
from random_graphs import assert_placements_sound
from random_programs import Leaf, Program

from autoshard.capture import capture

X = Leaf("x0", "input", (12, 12), grad=True)
Y = Leaf("x1", "input", (12, 12))
W = Leaf("w0", "parameter", (12, 12))


@pytest.mark.parametrize("view", ["reshape(-1)", "contiguous()", "flatten()", "t().reshape(-1)"])
def test_writing_to_what_may_be_a_view_or_a_copy(view: str) -> None:
    """In eager the sum is not contiguous, so that its reshape is a copy; a gathered one is contiguous."""
    lines = f"""
        v0 = F.linear(x0,w0)
        v1 = v0.t()+x1.t()
        v2 = v1.{view}
        v2.mul_(2.0)
    """
    assert_placements_sound(Program.of((X, Y, W), lines, "v1", "v2"))


@pytest.mark.parametrize("strides", ["(1,12)", "(12,1)"])
def test_memory_read_by_strides(strides: str) -> None:
    lines = f"""
        v0 = F.linear(x0,w0)
        v1 = v0.t()*2
        v2 = torch.as_strided(v1,(3,4),{strides})
        v3 = v2*v1.sum()
    """
    assert_placements_sound(Program.of((X, W), lines, "v3"))


@pytest.mark.parametrize("strides", ["(1,12)", "(12,1)"])
def test_memory_read_by_strides_after_a_write(strides: str) -> None:
    """The write becomes functional: it is that result whose strides are kept."""
    lines = f"""
        v0 = F.linear(x0,w0)
        v1 = v0.t()+0
        v1.relu_()
        v2 = torch.as_strided(v1,(3,4),{strides})
    """
    assert_placements_sound(Program.of((X, W), lines, "v2"))


def test_memory_without_writes_or_strides_is_not_copied() -> None:
    program = Program.of((X, W), "v0 = F.linear(x0,w0).t().reshape(-1)", "v0")
    graph = capture(program.module(), program.arguments()).graph
    assert [op.target for op in graph.ops if "clone" in op.target] == []


def test_batch_norm_whose_result_nobody_takes() -> None:
    """It still updates its running statistics."""
    mean, var = Leaf("b0", "buffer", (12,)), Leaf("b1", "buffer", (12,), "positive")
    lines = """
        v0 = F.linear(x0,w0)
        v1 = F.batch_norm(v0,b0,b1,None,None,True,0.1,0.1)
    """
    assert_placements_sound(Program.of((X, W, mean, var), lines, "v0"))


@pytest.mark.parametrize(
    "lines",
    [
        "v0 = torch.empty_like(x0).copy_(x0)\nv0[1]=v0[0]\nwith torch.no_grad(): v1 = v0*v0",
        "v0 = x0.t()*2\nv0[0:].copy_(v0[0:])\nwith torch.no_grad(): v1 = F.linear(v0,w0)",
        "with torch.no_grad(): v1 = x0.amax()\nv0 = x0.mT\nv2 = torch.empty_like(v0).copy_(v0)",
    ],
)
def test_writing_beside_a_block_without_gradients(lines: str) -> None:
    """Export forgets users of what is written to where it cuts such a block out."""
    assert_placements_sound(Program.of((X, W), lines, "v0", "v1"))


def test_batch_norm_of_blocks_of_one_channel() -> None:
    """torch's own is wrong where its weight has steps between its elements."""
    weight, bias = Leaf("w1", "frozen", (8,)), Leaf("w2", "frozen", (8,))
    lines = """
        v0 = torch.cat((x0,x0),1)
        v1 = F.batch_norm(v0,None,None,w1,w2,True,0.1,0.1)
    """
    x = Leaf("x0", "input", (12, 4), grad=True)
    assert_placements_sound(Program.of((x, weight, bias), lines + "v2 = v1*2", "v2", "v1"), 20)


@pytest.mark.parametrize(
    "text",
    [
        "x2.softmax(-1)", "x2.logcumsumexp(0)", "x2.sort(0)[0]", "x2.topk(1,0)[0]", "x2.flip(0)",
        "x2.gather(0,x3)", "x2.index_select(0,x3.view(1))", "x2.kthvalue(1)[0]", "x2.movedim(0,0)",
        "x2.cummax(0)[0]", "x2.amax(0)", "x2.sum(-1)",
    ],
)  # fmt: skip
def test_a_scalar_has_a_dimension_to_look_along(text: str) -> None:
    """torch takes a tensor without dimensions for one with a single element in one."""
    scalar, zero = Leaf("x2", "input", (), grad=True), Leaf("x3", "input", (), "1")
    program = Program.of((X, W, scalar, zero), f"v0 = {text}\nv1 = F.linear(x0,w0)*v0", "v0", "v1")
    assert_placements_sound(program, 2)
