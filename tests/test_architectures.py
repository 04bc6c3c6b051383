"""Models as users write them: sharded equals unsharded (outputs, gradients, parameters, buffers)."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from architectures import CASES, Built
from oracle import IDEAL_ALL, IDEAL_TENSOR, assert_sound
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map

from autoshard import autoshard, plan

for kind in ("weights", "vision", "calls", "sequence"):
    importlib.import_module(f"architectures_{kind}")

SLOW = pytest.mark.slow
HOW = pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, IDEAL_ALL, id="2-all"),
        pytest.param(3, IDEAL_TENSOR, id="3-tensor"),
        pytest.param(2, IDEAL_TENSOR, id="2-tensor", marks=SLOW),
        pytest.param(3, IDEAL_ALL, id="3-all", marks=SLOW),
    ],
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@HOW
@pytest.mark.parametrize("name", CASES)
def test_an_architecture(name: str, ranks: int, options: dict[str, str]) -> None:
    model, args, kwargs = CASES[name]()
    assert_sound(model, args, kwargs, ranks, **options)


# --- called again: other modes, other shapes, a state that goes out and in ------------------------


def _double(name: str) -> Built:
    model, args, kwargs = CASES[name]()
    args, kwargs = tree_map(lambda x: x.double() if _floats(x) else x, (args, kwargs))
    return model.double(), args, kwargs


def _floats(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _assert_equal(found: Any, wanted: Any) -> None:
    for a, b in zip(tree_flatten(found)[0], tree_flatten(wanted)[0], strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "exponential_averages",
        "batch_norm_of_each_kind",
        "depthwise_separable_with_squeeze_excite",
        "spectral_norm",
        "encoder_and_decoder",
        pytest.param("gan", marks=SLOW),
        pytest.param("recurrent_layers", marks=SLOW),
    ],
)
def test_eval_after_training_and_back(name: str) -> None:
    model, args, kwargs = _double(name)
    sharded = autoshard(copy.deepcopy(model), 2, args, kwargs, **IDEAL_ALL)
    for training in (True, False, True):
        for each in (model, sharded):
            each.train(training)
        _assert_equal(sharded(*args, **kwargs), model(*args, **kwargs))
    _assert_equal(dict(sharded.named_buffers()), {n: b for n, b in model.named_buffers() if n in dict(sharded.named_buffers())})  # fmt: skip


def _longer(x: Any, dim: int) -> Any:
    return torch.cat([x, x[:, :1] if dim else x[:1]], dim) if isinstance(x, Tensor) else x


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("unet", 0),
        ("multi_query_of_three_heads", 1),
        ("lora_by_hand", 1),
        ("selective_scan", 1),
        pytest.param("in_place_chains", 0, marks=SLOW),
        pytest.param("experts_by_one_hot", 0, marks=SLOW),
        pytest.param("tied_embedding_both_ways", 1, marks=SLOW),
        pytest.param("linear_attention", 1, marks=SLOW),
    ],
)
def test_other_shapes_with_the_weights_where_they_are(name: str, dim: int) -> None:
    model, args, kwargs = _double(name)
    sharded = autoshard(copy.deepcopy(model), 3, args, kwargs, **IDEAL_TENSOR)
    wider = tuple(_longer(x, dim) for x in args)
    for given in (args, wider, args):
        wanted, found = model(*given, **kwargs), sharded(*given, **kwargs)
        _assert_equal(found, wanted)
        for out in (wanted, found):
            sum(x.sum() for x in tree_flatten(out)[0] if _floats(x)).backward()
    theirs = {n: p.grad for n, p in model.named_parameters()}
    _assert_equal({n: p.grad for n, p in sharded.named_parameters()}, theirs)


@pytest.mark.parametrize(
    "name",
    [
        "weight_norm",
        "dora",
        "tied_embedding_both_ways",
        "key_value_cache",
        "parameter_list_and_dict",
    ],
)
def test_a_state_dict_goes_out_and_in(name: str) -> None:
    model, args, kwargs = _double(name)
    sharded = autoshard(copy.deepcopy(model), 3, args, kwargs, **IDEAL_ALL)
    other = _double(name)[0]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    sharded.load_state_dict(other.state_dict())
    assert list(sharded.state_dict()) == list(model.state_dict())
    model.load_state_dict(sharded.full_state_dict())
    _assert_equal(model(*args, **kwargs), other(*args, **kwargs))
    _assert_equal(sharded(*args, **kwargs), other(*args, **kwargs))


# --- frozen weights, dtypes, functions of the user's own ----------------------------------------------


def test_frozen_weights_get_no_gradient_memory_and_no_optimizer_state() -> None:
    model, args, kwargs = CASES["lora_by_hand"]()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = plan(model, 1, args, kwargs, **IDEAL_TENSOR).cost.memory
    assert whole.gradients_bytes == 4 * trained
    assert whole.optimizer_bytes == 8 * trained
    assert whole.weights_bytes >= 4 * sum(p.numel() for p in model.parameters())
    split = plan(model, 2, args, kwargs, **IDEAL_TENSOR)
    assert split.cost.memory.gradients_bytes < whole.gradients_bytes
    frozen = {w.fqn: w.split for w in split.weights if "base" in w.fqn}
    assert set(frozen.values()) & {"column", "row"}


class Autocast(nn.Module):
    """Products in bfloat16, a norm and a softmax in float32, a block that leaves autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.norm(x + self.b(F.gelu(self.a(x))))
            with torch.autocast("cpu", enabled=False):
                y = self.c(y.float()).softmax(-1)
            return y.unsqueeze(1) @ self.a.weight.t().unsqueeze(0)


@HOW
def test_autocast_inside_forward(ranks: int, options: dict[str, str]) -> None:
    sharded = assert_sound(Autocast(), (torch.randn(4, 8),), {}, ranks, 0.02, 1, torch.float32, **options)  # fmt: skip
    assert sharded(torch.randn(4, 8)).dtype == torch.bfloat16


@HOW
@pytest.mark.parametrize(
    "name",
    ["multi_query_of_three_heads", "lora_by_hand", "the_same_block_again_and_again", "mlp_mixer"],
)
def test_whole_models_in_bfloat16(name: str, ranks: int, options: dict[str, str]) -> None:
    """Sums of other parts round otherwise: to the 8 bits of a mantissa."""
    model, args, kwargs = CASES[name]()
    for buffer in model.buffers():
        buffer.data = buffer.data.bfloat16()
    assert_sound(model, args, kwargs, ranks, 0.06, 1, torch.bfloat16, **options)


class _Clipped(torch.autograd.Function):
    """A backward that forward does not say: the gradient is scaled by three and clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 3 * gradient * (x.abs() < 2 * ctx.bound), None


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(_Clipped.apply(self.a(x), 0.5))


@HOW
def test_a_custom_function_is_kept(ranks: int, options: dict[str, str]) -> None:
    """Export drops its backward: silently, the gradients would be clamp's own."""
    assert_sound(OwnFunction(), (torch.randn(4, 8),), {}, ranks, **options)
