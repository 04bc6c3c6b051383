"""Around the model: gradient norms, optimizers, state, inputs, errors."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from oracle import IDEAL_TENSOR, assert_sound
from pitfall_models import BOTH, RANKS, TwoBranches, kinds
from torch import Tensor, nn

import autoshard
from autoshard import CaptureError, ConstraintError, OptionsError, Plan, PlanError


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@RANKS
def test_gradient_norm_over_split_and_whole_parameters(ranks: int) -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 12)).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    sharded = autoshard.autoshard(copy.deepcopy(model), ranks, (x,), **IDEAL_TENSOR)
    norms = []
    for module in (model, sharded):
        module(x).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.1))
    torch.testing.assert_close(norms[1], norms[0])
    for (name, a), b in zip(model.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)


OPTIMIZERS = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_adamw_foreach_and_fused_and_sgd_with_momentum(name: str) -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 12)).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    sharded = autoshard.autoshard(copy.deepcopy(model), 2, (x,), **IDEAL_TENSOR)
    for module in (model, sharded):
        optimizer = OPTIMIZERS[name](module.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    for (label, a), b in zip(model.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(b, a, msg=label)


def test_a_state_dict_goes_in_and_out() -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 12))
    x = torch.randn(4, 12)
    sharded = autoshard.autoshard(model, 2, (x,), **IDEAL_TENSOR)
    other = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 12))
    assert list(sharded.state_dict()) == list(other.state_dict())
    sharded.load_state_dict(other.state_dict())
    torch.testing.assert_close(sharded(x), other(x))
    fresh = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 12))
    fresh.load_state_dict(sharded.full_state_dict())
    torch.testing.assert_close(fresh.eval()(x), other.eval()(x))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) * self.b(y).tanh()


def test_the_same_tensor_passed_twice_is_two_inputs() -> None:
    model, x = TwoInputs().double(), torch.randn(4, 12, dtype=torch.float64)
    sharded = autoshard.autoshard(model, 2, (x, x), **IDEAL_TENSOR)
    assert len(sharded.plan.inputs) == 2
    y = torch.randn(4, 12, dtype=torch.float64)
    for given in ((x, y), (x, x)):
        wanted, found = model(*given), sharded(*given)
        torch.testing.assert_close(found, wanted)
        slopes = [
            torch.autograd.grad(out.square().sum(), list(module.parameters()))
            for module, out in ((model, wanted), (sharded, found))
        ]
        torch.testing.assert_close(slopes[1], slopes[0])


def test_the_same_tensor_passed_twice_gets_the_gradients_of_both() -> None:
    model = TwoInputs().double()
    x = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    sharded = autoshard.autoshard(model, 2, (x, x), **IDEAL_TENSOR)
    slopes = [torch.autograd.grad(m(x, x).square().sum(), x) for m in (model, sharded)]
    torch.testing.assert_close(slopes[1], slopes[0])


@BOTH
def test_gradients_of_inputs(options: dict[str, str]) -> None:
    model = TwoInputs().double()
    x, y = (torch.randn(4, 12, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sharded = autoshard.autoshard(model, 2, (x, y), **options)
    wanted = torch.autograd.grad(model(x, y).sum(), (x, y))
    found = torch.autograd.grad(sharded(x, y).sum(), (x, y))
    torch.testing.assert_close(found, wanted)


def test_world_size_1_is_the_identity() -> None:
    model = TwoBranches()
    sharded = assert_sound(model, (torch.randn(2, 5, 24),), ranks=1)
    assert not kinds(sharded)
    assert not any("autoshard" in str(n.target) for n in sharded.graph_module.graph.nodes)
    assert {w.split for w in sharded.plan.weights} == {"replicated"}


def test_a_sharded_module_is_not_sharded_again() -> None:
    model, x = nn.Linear(12, 12), torch.randn(4, 12)
    sharded = autoshard.autoshard(model, 2, (x,))
    for call in (autoshard.autoshard, autoshard.plan, autoshard.verify):
        with pytest.raises(OptionsError, match="sharded already"):
            call(sharded, 2, (x,))


def test_a_constraint_that_matches_nothing_names_the_nearest() -> None:
    model, x = nn.Sequential(nn.Linear(12, 12)), torch.randn(4, 12)
    with pytest.raises(ConstraintError, match="matches no parameter") as caught:
        autoshard.plan(model, 2, (x,), constraints={"net.0.weight": "row"})
    assert caught.value.where == "net.0.weight"
    assert "0.weight" in caught.value.fix


def test_a_plan_key_that_matches_nothing_names_the_nearest() -> None:
    model, x = nn.Sequential(nn.Linear(12, 12)), torch.randn(4, 12)
    plan = autoshard.plan(model, 2, (x,), **IDEAL_TENSOR)
    key = "0.weight:parameter#0"
    assert key in {choice.key for choice in plan.choices}
    typo = plan.to_json().replace(key, "0.weigth:parameter#0")
    with pytest.raises(PlanError, match="matches no operator") as caught:
        autoshard.autoshard(model, 2, (x,), plan=Plan.from_json(typo))
    assert caught.value.where == "0.weigth:parameter#0"
    assert key in caught.value.fix


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.sum() > 0:
            return y
        return -y


def test_python_control_flow_on_tensor_values_is_an_error_at_the_line() -> None:
    with pytest.raises(CaptureError, match=r"if y\.sum\(\) > 0:") as caught:
        autoshard.plan(Branching(), 2, (torch.randn(4, 12),))
    assert Path(__file__).name in caught.value.where
    assert "torch.where" in caught.value.fix
