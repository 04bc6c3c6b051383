"""Bad input gets one readable error, at the public functions: what is wrong, where, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import llama, mlp
from oracle import assert_sound
from torch import Tensor, nn

import autoshard
from autoshard import (
    AutoshardError,
    CaptureError,
    ConstraintError,
    MeshError,
    OptionsError,
    Plan,
    PlanError,
    SolverError,
    VerifyError,
)

HERE = Path(__file__).name


@pytest.fixture
def made() -> Plan:
    model, kwargs = mlp()
    return autoshard.plan(model, 2, (), kwargs, hardware="ideal")


def readable(error: AutoshardError) -> str:
    """The message, checked to be short enough to read, and in whole sentences."""
    text = str(error)
    assert len(text) < 1200
    assert "Traceback" not in text
    assert error.what.endswith((".", ")", ";")) or "raises" in error.what
    return text


# --- plans ------------------------------------------------------------------------------------------


def test_a_truncated_plan(made: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = made.to_json()
    path.write_text(text[: len(text) // 2])
    model, kwargs = mlp()
    for use in (
        lambda: Plan.load(path),
        lambda: autoshard.autoshard(model, 2, (), kwargs, plan=path),
        lambda: autoshard.verify(model, 2, (), kwargs, plan=str(path)),
    ):
        with pytest.raises(PlanError, match="cut short") as caught:
            use()
        assert str(path) in readable(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1}', "not an autoshard plan"),
        ("[1, 2]", "not an autoshard plan"),
        ("<html>", "not JSON"),
        ("", "empty"),
    ],
)
def test_a_foreign_file(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=says) as caught:
        Plan.load(path)
    assert str(path) in readable(caught.value)


def test_a_plan_of_another_version(made: Plan) -> None:
    document = json.loads(made.to_json())
    document["version"] = 99
    with pytest.raises(PlanError, match="version 99") as caught:
        Plan.from_json(json.dumps(document))
    assert "Upgrade" in readable(caught.value)


def test_a_missing_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such file"):
        autoshard.plan(nn.Linear(2, 2), 2, (torch.ones(1, 2),), plan=tmp_path / "none.json")


def test_a_plan_for_another_model(made: Plan) -> None:
    model, kwargs = llama()
    for call in (autoshard.autoshard, autoshard.plan, autoshard.verify):
        with pytest.raises(PlanError, match="another model or other input shapes") as caught:
            call(model, 2, (), kwargs, plan=made)
        text = readable(caught.value)
        assert "Mlp" in text
        assert "LlamaForCausalLM" in text


def test_a_plan_for_other_shapes(made: Plan) -> None:
    model, _ = mlp()
    with pytest.raises(PlanError, match=r"made for Mlp with x float32\[8, 32\]"):
        autoshard.autoshard(model, 2, (), {"x": torch.randn(4, 32)}, plan=made)


def test_a_mesh_that_does_not_fit_the_plan(made: Plan) -> None:
    model, kwargs = mlp()
    with pytest.raises(MeshError, match=r"plan is for the mesh .*2.* and .*4.* is asked for"):
        autoshard.autoshard(model, 4, (), kwargs, plan=made)
    with pytest.raises(MeshError, match="is asked for"):
        autoshard.verify(model, 4, (), kwargs, plan=made)


def test_a_plan_whose_strategies_were_edited(made: Plan) -> None:
    model, kwargs = mlp()
    document = json.loads(made.to_json())
    for choice in document["choices"]:
        if choice["key"].startswith("net.0.weight"):
            choice["strategy"] = "-> S(7)"
    with pytest.raises(
        PlanError, match=r"net\.0\.weight.* not one of its sound strategies"
    ) as caught:
        autoshard.autoshard(model, 2, (), kwargs, plan=Plan.from_json(json.dumps(document)))
    assert "It can run as" in readable(caught.value)


# --- options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"world_size": None}, MeshError, "Neither world_size nor mesh|Neither"),
        ({"mesh": {"tp": 2}}, MeshError, "Both"),
        ({"world_size": 0}, MeshError, "0"),
        ({"world_size": -2}, MeshError, "-2"),
        ({"world_size": None, "mesh": {"dp": 2, "tp": 2}}, MeshError, "2 axes"),
        ({"world_size": None, "mesh": 3}, MeshError, "int is no mesh"),
        ({"hardware": "h100-smx"}, OptionsError, "h100-smx"),
        ({"memory_budget": "lots"}, OptionsError, "'lots' is no memory budget"),
        ({"memory_budget": -5}, OptionsError, "-5 is no memory budget"),
        ({"memory_budget": True}, OptionsError, "True is no memory budget"),
        ({"mode": "training"}, OptionsError, "mode is 'training'"),
        ({"search": "everything"}, OptionsError, "search is 'everything'"),
        ({"inputs": "shard"}, OptionsError, "inputs is 'shard'"),
        ({"outputs": "shard"}, OptionsError, "outputs is 'shard'"),
        ({"solver": "GLPK"}, SolverError, "no solver 'GLPK'"),
        ({"time_limit_s": 0}, OptionsError, "time_limit_s is 0"),
        ({"time_limit_s": "fast"}, OptionsError, "time_limit_s is 'fast'"),
        ({"constraints": ["a"]}, OptionsError, "constraints is no mapping"),
        (
            {"constraints": {"net.0.weight": "diagonal"}},
            ConstraintError,
            "'diagonal' is not a split",
        ),
        ({"constraints": {"net.0.weigth": "row"}}, ConstraintError, "matches no parameter"),
        ({"constraints": {"net.2.weight": "shard(3)"}}, ConstraintError, "cannot be stored"),
        ({"constraints": {3: "row"}}, AutoshardError, "3"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_options(options: dict[str, Any], kind: type[AutoshardError], says: str) -> None:
    model, kwargs = mlp()
    given = {"world_size": 2, **options}
    with pytest.raises(kind, match=says) as caught:
        autoshard.plan(model, args=(), kwargs=kwargs, **given)
    readable(caught.value)
    assert isinstance(caught.value, (ValueError, RuntimeError))
    with pytest.raises(kind, match=says):
        autoshard.autoshard(model, args=(), kwargs=kwargs, **given)
    with pytest.raises(kind, match=says):
        autoshard.verify(model, args=(), kwargs=kwargs, **given)


def test_an_option_of_verify_that_does_not_exist() -> None:
    model, kwargs = mlp()
    with pytest.raises(OptionsError, match="Unknown option hardwear"):
        autoshard.verify(model, 2, (), kwargs, hardwear="ideal")


def test_what_is_no_model() -> None:
    with pytest.raises(OptionsError, match=r"function is no nn\.Module"):
        autoshard.plan(lambda x: x, 2, (torch.ones(2),))  # type: ignore[arg-type]


def test_verify_needs_values() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(VerifyError, match="meta device has no values"):
        autoshard.verify(model, 2, (torch.ones(2, 4),))


# --- example inputs -----------------------------------------------------------------------------------


def test_missing_example_inputs() -> None:
    with pytest.raises(CaptureError, match="Linear needs example inputs") as caught:
        autoshard.plan(nn.Linear(4, 4), 2)
    assert "args=(…) or kwargs={…}" in readable(caught.value)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return self.a(x) * mask


def test_one_of_the_inputs_is_missing() -> None:
    with pytest.raises(
        CaptureError, match=r"called without an input that it needs .*mask"
    ) as caught:
        autoshard.plan(TwoInputs(), 2, (torch.ones(2, 4),))
    assert "example inputs" in readable(caught.value)


def test_an_input_that_the_model_does_not_take() -> None:
    given = {"mask": torch.ones(4), "maks": torch.ones(4)}
    with pytest.raises(CaptureError, match="maks") as caught:
        autoshard.plan(TwoInputs(), 2, (torch.ones(2, 4),), given)
    readable(caught.value)


def test_inputs_of_wrong_shapes_show_the_models_own_error() -> None:
    with pytest.raises(CaptureError, match="TwoInputs cannot be captured: it raises") as caught:
        autoshard.plan(TwoInputs(), 2, (torch.ones(2, 7),), {"mask": torch.ones(4)})
    text = readable(caught.value)
    assert "return self.a(x) * mask" in text
    assert HERE in text


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            raise ValueError("one row at a time,\nplease")
        return x


def test_an_error_of_the_models_own() -> None:
    with pytest.raises(CaptureError, match="it raises ValueError: one row at a time,") as caught:
        autoshard.plan(Raises(), 2, (torch.ones(2, 4),))
    assert "raise ValueError" in readable(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


# --- models that depend on data -------------------------------------------------------------------------


class Dependent(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.what = nn.Linear(4, 4), what

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.what)(self.a(x))

    def branch(self, y: Tensor) -> Tensor:
        if y.sum() > 0:
            return y
        return -y

    def loop(self, y: Tensor) -> Tensor:
        while y.abs().max() > 1:
            y = y / 2
        return y

    def item(self, y: Tensor) -> Tensor:
        return y * y.sum().item()

    def range_of_item(self, y: Tensor) -> Tensor:
        for _ in range(int(y.abs().sum())):
            y = y + 1
        return y

    def as_float(self, y: Tensor) -> Tensor:
        return y * float(y.mean())

    def as_list(self, y: Tensor) -> Tensor:
        return y * y.sum(0).tolist()[0]

    def nonzero(self, y: Tensor) -> Tensor:
        return y[y.sum(1).nonzero().flatten()]

    def mask(self, y: Tensor) -> Tensor:
        return y[y > 0]

    def unique(self, y: Tensor) -> Tensor:
        return torch.unique(y)

    def selected(self, y: Tensor) -> Tensor:
        return torch.masked_select(y, y > 0).sum()

    def repeated(self, y: Tensor) -> Tensor:
        return y.repeat_interleave(y[:, 0].abs().long(), 0)

    def slice_by_value(self, y: Tensor) -> Tensor:
        return y[: int(y.sum())]

    def asserted(self, y: Tensor) -> Tensor:
        assert not y.isnan().any()
        return y


@pytest.mark.parametrize("what", [n for n in vars(Dependent) if n != "forward" and n[0] != "_"])
def test_data_dependent_models(what: str) -> None:
    with pytest.raises(
        CaptureError, match=r"depend[s]? on (the data|the values of tensors)"
    ) as caught:
        autoshard.plan(Dependent(what), 2, (torch.randn(5, 4),))
    text = readable(caught.value)
    assert HERE in caught.value.where, "the user's line is named"
    assert f"in {what}" in text or "getattr(self, self.what)" in text
    assert caught.value.fix


class LeavesTorch(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.what = nn.Linear(4, 4), what

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.what == "numpy":
            return y * torch.from_numpy(y.detach().numpy())
        if self.what == "vmap":
            return torch.vmap(self.a)(y)
        if self.what == "cond":
            return torch.cond(y.sum() > 0, lambda t: t + 1, lambda t: t - 1, (y,))
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.a(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("numpy", "leaves torch"),
        ("vmap", r"torch\.vmap .*is not supported"),
        ("cond", "cond is not supported"),
        ("grad", "Gradients are computed inside"),
    ],
)
def test_models_that_leave_plain_torch(what: str, says: str) -> None:
    with pytest.raises(CaptureError, match=says) as caught:
        autoshard.plan(LeavesTorch(what), 2, (torch.randn(4, 4),))
    assert HERE in readable(caught.value)


def test_a_model_on_new_inputs_that_cannot_be_captured() -> None:
    class OneRow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                return super().forward(x) * x.sum().item()
            return super().forward(x)

    sharded = autoshard.autoshard(OneRow(4, 4), 2, (torch.ones(2, 4),))
    sharded(torch.ones(3, 4))
    with pytest.raises(CaptureError, match="number is read from a tensor"):
        sharded(torch.ones(1, 4))


# --- operators nobody knows -----------------------------------------------------------------------------


@torch.library.custom_op("autoshard_tests::twisted", mutates_args=())
def twisted(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).flip(-1) * 2


@twisted.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _twisted_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    gradient = gradient.flip(-1) * 2
    return gradient @ w.t(), x.t() @ gradient


twisted.register_autograd(_twisted_backward, setup_context=_keep)


class WithUnknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(twisted(self.a(x), self.w))


@pytest.mark.parametrize("search", ["tensor", "all"])
def test_an_unknown_operator_runs_whole_and_is_named(search: str) -> None:
    sharded = assert_sound(WithUnknown(), (torch.randn(4, 8),), search=search)
    fallback = next(f for f in sharded.plan.fallbacks if "twisted" in f.op)
    assert fallback.op == "autoshard_tests.twisted.default"
    assert fallback.count == 1
    record = next(w for w in sharded.plan.weights if w.fqn == "w")
    if search == "tensor":
        assert record.split == "replicated"
        assert "autoshard_tests.twisted.default has no rule" in record.reason
