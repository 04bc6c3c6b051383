"""Models of transformers that choose tokens by their values: what lies between runs whole, soundly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import IDEAL_ALL, IDEAL_TENSOR, assert_sound
from torch import Tensor, nn
from transformers import JetMoeConfig, JetMoeForCausalLM, PretrainedConfig, PreTrainedModel

import autoshard
from autoshard import CaptureError

BOTH = pytest.mark.parametrize("options", [IDEAL_TENSOR, IDEAL_ALL], ids=["tensor", "all"])


class Chosen(nn.Module):
    """One layer for the tokens above zero, another for the rest."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.outer, self.how = nn.Linear(16, 32), nn.Linear(32, 16), how
        self.other = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[..., 0] > 0
        y = x[chosen]
        y = self.outer(torch.relu(self.inner(y)))
        if self.how == "index_put":
            return self.other(x).index_put((chosen,), y)
        if self.how in ("written", "written and seen"):
            x = self.other(x)
            seen = x.view(-1)
            x[chosen] = y
            return x if self.how == "written" else x + seen.view_as(x)
        if self.how == "returned":
            return y
        if self.how == "dropped":
            y = torch.dropout(y, 0.5, True)
        return self.other(x).masked_scatter(chosen.unsqueeze(-1), y)


class Model(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, how: str, layers: int = 2) -> None:
        super().__init__(PretrainedConfig())
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Chosen(how) for _ in range(layers))
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["masked_scatter", "index_put", "written"])
@BOTH
def test_tokens_chosen_by_value(how: str, ranks: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sharded = assert_sound(Model(how), (torch.randn(4, 6, 16),), ranks=ranks, **options)
    plan = sharded.plan
    assert [f.count for f in plan.fallbacks if f.op.startswith("data_dependent")] == [2]
    split = {weight.fqn for weight in plan.weights if weight.split != "replicated"}
    assert {"first.weight", "last.weight"} <= split


def test_other_numbers_of_tokens_run_by_the_same_program() -> None:
    torch.manual_seed(0)
    model = Model("index_put").double()
    x = torch.randn(4, 6, 16, dtype=torch.float64)
    sharded = autoshard.autoshard(model, 2, (x,), **IDEAL_TENSOR)
    for given in (x, -x, x.abs() + 1, -x.abs() - 1):
        torch.testing.assert_close(sharded(given), model(given), rtol=1e-10, atol=1e-10)


def test_what_is_dropped_is_dropped_again_for_the_gradient() -> None:
    torch.manual_seed(0)
    model = Model("dropped").double()
    x = torch.randn(4, 6, 16, dtype=torch.float64)
    sharded = autoshard.autoshard(model, 2, (x,), **IDEAL_TENSOR)
    for module in (model, sharded):
        torch.manual_seed(1)
        module(x).square().sum().backward()
    found = dict(sharded.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-9, atol=1e-9)


def test_a_result_of_unknown_shape_is_refused_at_its_line() -> None:
    with pytest.raises(CaptureError, match="shape of a tensor depends on the data") as caught:
        autoshard.plan(Model("returned", 1), 2, (torch.randn(4, 6, 16),))
    assert "y = x[chosen]" in caught.value.where


def test_memory_that_others_see_is_not_written_to_inside() -> None:
    with pytest.raises(CaptureError, match="shape of a tensor depends on the data"):
        autoshard.plan(Model("written and seen"), 2, (torch.randn(4, 6, 16),))


def test_plans_name_the_same_operators_in_every_capture() -> None:
    given = (torch.randn(4, 6, 16),)
    first, second = (autoshard.plan(Model("index_put"), 2, given, **IDEAL_TENSOR) for _ in range(2))
    assert first.to_json() == second.to_json()


@BOTH
def test_experts_by_lists_of_sizes(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = JetMoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8,
        intermediate_size=48, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = JetMoeForCausalLM(config).eval()
    ids = torch.randint(64, (2, 9))
    kwargs = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    assert_sound(model, (), kwargs, bound=1e-5, **options)
