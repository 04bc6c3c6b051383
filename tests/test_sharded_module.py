"""The sharded module as a module: names, state, modes, calls; in the simulator."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from models import MODELS, gpt2, llama, mlp, resnet, t5, to_double
from torch import Tensor, nn

import autoshard
from autoshard import CaptureError, OptionsError, ShardedModule

pytestmark = pytest.mark.slow


def shard(
    model: nn.Module, kwargs: dict[str, Any], ranks: int = 2, **options: Any
) -> ShardedModule:
    return autoshard.autoshard(model, ranks, kwargs=kwargs, **{"hardware": "ideal", **options})


def loss_of(out: Any) -> Tensor:
    tensors = [
        x for x in (out.values() if isinstance(out, dict) else [out]) if isinstance(x, Tensor)
    ]
    return sum((x * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).mean() for x in tensors)


def assert_trains_alike(model: nn.Module, sharded: ShardedModule, kwargs: dict[str, Any]) -> None:
    """Outputs and gradients of one call, in float64."""
    wanted, found = model(**kwargs), sharded(**kwargs)
    torch.testing.assert_close(loss_of(found).detach(), loss_of(wanted).detach())
    for module, out in ((model, wanted), (sharded, found)):
        module.zero_grad()
        loss_of(out).backward()
    ours = dict(sharded.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            ours[name].grad, parameter.grad, msg=lambda m, n=name: f"{n}: {m}"
        )


# --- names --------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters after children, unused ones, buffers of both kinds, ties across the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, bias=False)
        self.middle = nn.Sequential(nn.Dropout(0.0), nn.Linear(16, 16), nn.BatchNorm1d(16))
        self.last = nn.Linear(8, 16)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(16))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.arange(16.0), persistent=False)
        self.register_buffer("kept", torch.arange(16.0))
        self.register_parameter("nothing", None)
        self.constant = torch.linspace(0, 1, 16)

    def forward(self, x: Tensor, flag: bool = True, factor: float = 1.0) -> Tensor:
        y = self.middle(self.first(x)) * self.scale + self.shift - self.kept + self.constant
        z = self.last(x) if flag else self.first(x)
        return torch.tanh(y * factor) @ z.T + torch.tensor([2.0])


def odd() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Odd(), {"x": torch.randn(6, 8)}


@pytest.mark.parametrize("name", [*MODELS, "odd"])
def test_names_and_order_are_the_originals(name: str) -> None:
    model, kwargs = odd() if name == "odd" else MODELS[name]()
    sharded = shard(model, kwargs)
    for of in (nn.Module.named_parameters, nn.Module.named_buffers):
        for duplicates in (True, False):
            names = [[n for n, _ in of(m, remove_duplicate=duplicates)] for m in (sharded, model)]
            assert names[0] == names[1]
    assert list(sharded.state_dict()) == list(model.state_dict())
    assert [n for n, _ in sharded.named_modules()] == [n for n, _ in model.named_modules()]
    for ours, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        assert (ours.shape, ours.dtype, ours.requires_grad) == (
            theirs.shape,
            theirs.dtype,
            theirs.requires_grad,
        )
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()


def test_tied_weights_are_one_parameter() -> None:
    model, kwargs = gpt2()
    sharded = shard(model, kwargs)
    assert sharded.lm_head.weight is sharded.transformer.wte.weight
    sharded = shard(*t5())
    assert (
        sharded.shared.weight
        is sharded.encoder.embed_tokens.weight
        is sharded.decoder.embed_tokens.weight
    )


# --- state --------------------------------------------------------------------------------------


def test_a_state_dict_goes_both_ways() -> None:
    model, kwargs = to_double(resnet())
    sharded = shard(model, kwargs)
    for parameter in sharded.parameters():
        parameter.data.add_(0.25)
    fresh, _ = to_double(resnet())
    assert fresh.load_state_dict(sharded.state_dict()).missing_keys == []
    for name, value in sharded.full_state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name])
    other = shard(to_double(resnet())[0], kwargs)
    other.load_state_dict(fresh.state_dict())
    assert_trains_alike(copy.deepcopy(fresh), sharded, kwargs)
    assert_trains_alike(fresh, other, kwargs)


def test_a_state_dict_that_does_not_fit() -> None:
    model, kwargs = mlp()
    sharded = shard(model, kwargs)
    state = model.state_dict()
    state["strange"] = state.pop("net.0.weight")
    with pytest.raises(
        RuntimeError, match=r"Missing key.*net\.0\.weight.*\n.*Unexpected key.*strange"
    ):
        sharded.load_state_dict(state)
    found = sharded.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["net.0.weight"], ["strange"])
    with pytest.raises(RuntimeError, match=r"size mismatch for net\.0\.weight"):
        sharded.load_state_dict({**model.state_dict(), "net.0.weight": torch.zeros(3, 3)})


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate(set_to_none: bool) -> None:
    model, kwargs = to_double(llama())
    sharded = shard(model, kwargs)
    for _ in range(2):
        for module in (model, sharded):
            module.zero_grad(set_to_none=set_to_none)
            for ids in (kwargs["input_ids"], kwargs["input_ids"].flip(0)):
                loss_of(module(**{**kwargs, "input_ids": ids})).backward()
    ours = dict(sharded.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad)


def test_gradients_of_gradients() -> None:
    model, kwargs = to_double(mlp())
    for module in model.modules():  # a piecewise linear function has no second derivative to test
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.Tanh())
    sharded = shard(model, kwargs)

    def penalty(module: nn.Module) -> list[Tensor]:
        x = kwargs["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(x=x).sum(), x, create_graph=True)
        return list(
            torch.autograd.grad((slope**2).sum(), list(module.parameters()), allow_unused=True)
        )

    for found, wanted in zip(penalty(sharded), penalty(model), strict=True):
        if wanted is None:  # the last bias
            assert found is None or not found.any()
        else:
            torch.testing.assert_close(found, wanted)


def test_frozen_parameters() -> None:
    model, kwargs = to_double(gpt2())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    sharded = shard(model, kwargs)
    assert [p.requires_grad for p in sharded.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert_trains_alike(model, sharded, kwargs)
    for module in (model, sharded):  # thawed after sharding: what was no gradient's way now is one
        module.zero_grad()
        module.requires_grad_(True)
    assert_trains_alike(model, sharded, kwargs)
    for module in (model, sharded):
        module.zero_grad()
        module.transformer.h[0].requires_grad_(False) if module is model else None
    for name, parameter in sharded.named_parameters():
        parameter.requires_grad_("h.0." not in name)
    assert_trains_alike(model, sharded, kwargs)


def test_an_input_that_wants_its_gradient() -> None:
    """It was planned as one that does not: captured again, and sound."""
    model, kwargs = to_double(mlp())
    sharded = shard(model, kwargs)
    assert_trains_alike(model, sharded, kwargs)
    gradients = []
    for module in (model, sharded):
        x = kwargs["x"].clone().requires_grad_()
        loss_of(module(x=x)).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    assert len(sharded._prepared) == 2
    with_gradient = shard(model, {"x": kwargs["x"].clone().requires_grad_()})
    x = kwargs["x"].clone().requires_grad_()
    with_gradient.zero_grad()
    loss_of(with_gradient(x=x)).backward()
    torch.testing.assert_close(x.grad, gradients[0])


# --- modes and shapes ---------------------------------------------------------------------------


def test_train_and_eval() -> None:
    model, kwargs = to_double(resnet())
    sharded = shard(model, kwargs)
    for training in (True, False, True):
        for module in (model, sharded):
            module.train(training)
        assert_trains_alike(model, sharded, kwargs)
    buffers = dict(sharded.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffers[name], buffer)
    assert len(sharded._prepared) == 2


def test_one_module_in_eval_mode() -> None:
    """Frozen batch norms in a model that trains: before sharding, and after it, by name."""
    model, kwargs = to_double(resnet())
    norms = [name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    model.get_submodule(norms[0]).eval()
    sharded = shard(model, kwargs)
    assert_trains_alike(model, sharded, kwargs)
    smaller = {name: value[:2] for name, value in kwargs.items()}
    assert_trains_alike(model, sharded, smaller)
    for module in (model, sharded):
        module.get_submodule(norms[1]).eval()
    assert_trains_alike(model, sharded, kwargs)


@pytest.mark.parametrize("search", ["tensor", "all"])
def test_new_shapes_are_captured_again(search: str, caplog: pytest.LogCaptureFixture) -> None:
    model, kwargs = to_double(llama())
    sharded = shard(model, kwargs, search=search)
    placed = [p.data_ptr() for p in sharded.parameters()]
    with caplog.at_level(logging.INFO, "autoshard"):
        for batch, sequence in ((4, 16), (3, 7), (1, 16), (3, 7)):
            cut = {**kwargs, **{n: kwargs[n][:batch, :sequence] for n in ("input_ids", "labels")}}
            assert_trains_alike(model, sharded, cut)
    assert [p.data_ptr() for p in sharded.parameters()] == placed
    assert sum("captured and planned again" in record.message for record in caplog.records) == 2


def test_no_grad_and_inference_mode() -> None:
    model, kwargs = to_double(llama())
    sharded = shard(model, kwargs)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found, wanted = sharded(**kwargs), model(**kwargs)
        assert not found.loss.requires_grad
        torch.testing.assert_close(found.logits, wanted.logits)
    assert_trains_alike(model, sharded, kwargs)


def test_another_dtype() -> None:
    model, kwargs = llama()
    sharded = shard(model, kwargs)
    assert sharded(**kwargs).logits.dtype == torch.float32
    for dtype in (torch.float64, torch.bfloat16):
        for module in (model, sharded):
            module.to(dtype)
        found, wanted = sharded(**kwargs), model(**kwargs)
        assert found.logits.dtype == wanted.logits.dtype == dtype
        tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(found.logits, wanted.logits, **tolerance)


def test_autocast_around_the_call() -> None:
    """It is captured with its casts written out: dtypes and values are the model's own under autocast."""
    for build in (mlp, llama):
        model, kwargs = build()
        sharded = shard(model, kwargs)
        for enabled in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                wanted, found = model(**kwargs), sharded(**kwargs)
                with_casts = shard(model, kwargs)
                again = with_casts(**kwargs)
            for out in (
                (wanted, found, again)
                if build is mlp
                else (wanted.logits, found.logits, again.logits)
            ):
                assert out.dtype == (torch.bfloat16 if enabled else torch.float32)
            tolerance = {"rtol": 0.05, "atol": 0.05} if enabled else {}
            torch.testing.assert_close(loss_of(found), loss_of(wanted), **tolerance)
            torch.testing.assert_close(loss_of(again), loss_of(wanted), **tolerance)
            for module, out in ((model, wanted), (sharded, found)):
                module.zero_grad()
                loss_of(out).backward()
            for ours, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
                off = (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
                assert off < (0.1 if enabled else 1e-4)
        assert len(sharded._prepared) == 2


# --- calls --------------------------------------------------------------------------------------


def test_called_by_position_and_by_keyword() -> None:
    model, kwargs = odd()
    sharded = autoshard.autoshard(model, 2, (kwargs["x"],), hardware="ideal")
    x = kwargs["x"]
    for args, given in (((x,), {}), ((), {"x": x}), ((x, False), {}), ((x,), {"flag": False, "factor": 0.5}),
                        ((), {"factor": 0.5, "x": x, "flag": False}), ((x[:4], True, 2.0), {})):  # fmt: skip
        wanted, found = copy.deepcopy(model)(*args, **given), copy.deepcopy(sharded)(*args, **given)
        torch.testing.assert_close(found, wanted)


def test_keywords_in_another_order() -> None:
    model, kwargs = to_double(llama())
    sharded = shard(model, kwargs)
    assert_trains_alike(model, sharded, dict(reversed(kwargs.items())))


class Structured(nn.Module):
    """Results of every kind, with plain values among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Any], *more: Tensor, name: str = "a") -> dict[str, Any]:
        x = self.linear(batch["x"]) + sum(more)
        return {
            "pair": (x, x.sum()),
            "list": [x.mean(-1), None, name],
            "count": 3,
            "same": x,
            "input": batch["x"],
        }


def test_results_keep_their_structure() -> None:
    torch.manual_seed(0)
    model = Structured()
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    sharded = autoshard.autoshard(model, 2, ({"x": x}, y), hardware="ideal")
    wanted, found = model({"x": x}, y), sharded({"x": x}, y)
    assert found["list"].pop() == wanted["list"].pop() == "a"
    torch.testing.assert_close(found, wanted)
    assert sharded({"x": x}, y, name="b")["list"][2] == "b"
    assert type(sharded({"x": x})["pair"]) is tuple


def test_model_outputs_are_transformers() -> None:
    model, kwargs = llama()
    sharded = shard(model, kwargs)
    wanted, found = model(**kwargs), sharded(**kwargs)
    assert type(found) is type(wanted)
    assert list(found) == list(wanted)
    plain = sharded(**{**kwargs, "return_dict": False})
    assert isinstance(plain, tuple)
    torch.testing.assert_close(plain[1], wanted.logits)


def test_wrong_arguments() -> None:
    model, kwargs = mlp()
    sharded = shard(model, kwargs)
    wrong = {
        "missing a required argument: 'x'": ((), {}),
        "'z'": ((), {"x": kwargs["x"], "z": 1}),
        "too many positional arguments": ((kwargs["x"], 1), {}),
        "cannot be captured": ((torch.randn(8, 3),), {}),
    }
    for words, (args, given) in wrong.items():
        with pytest.raises(CaptureError) as raised:
            sharded(*args, **given)
        text = str(raised.value)
        assert text.startswith("Mlp ")
        assert words in text
        assert len(text.splitlines()) <= 3
    torch.testing.assert_close(sharded(**kwargs), model(**kwargs))


# --- the caller's model -------------------------------------------------------------------------


def test_nothing_of_the_model_is_changed() -> None:
    model, kwargs = resnet()
    model.train()
    model.get_submodule("resnet.embedder").eval()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(model)
    identities = {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    sharded = shard(model, kwargs)
    calls.clear()
    for _ in range(2):
        loss_of(sharded(**kwargs)).backward()
    torch.optim.SGD(sharded.parameters(), 0.1).step()
    assert not calls
    sharded.eval()
    sharded({name: value[:2] for name, value in kwargs.items()}["pixel_values"])
    assert identities == {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    assert attributes == {name: set(vars(m)) for name, m in model.named_modules()}
    for (name, tensor), (_, old) in zip(
        model.state_dict().items(), before.state_dict().items(), strict=True
    ):
        assert torch.equal(tensor, old), name
    assert all(p.grad is None for p in model.parameters())
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert len(model._forward_hooks) == 1


def test_the_model_may_go() -> None:
    """Neither the sharded module nor its programs keep the original's weights in memory."""
    import gc
    import weakref

    model, kwargs = mlp()
    weights = [weakref.ref(p) for p in model.parameters()]
    sharded = shard(model, kwargs)
    del model
    gc.collect()
    assert not any(ref() is not None for ref in weights)
    sharded({name: value[:3] for name, value in kwargs.items()}["x"])


def test_an_optimizer_built_before_is_moved_over() -> None:
    model, kwargs = to_double(mlp())
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, fused=True) for m in (reference, model)]
    for module, optimizer in zip((reference, model), optimizers, strict=True):
        loss_of(module(**kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded = shard(model, kwargs)
    sharded.rebind(optimizers[1])
    assert {id(p) for g in optimizers[1].param_groups for p in g["params"]} == {
        id(p) for p in sharded.parameters()
    }
    for module, optimizer in zip((reference, sharded), optimizers, strict=True):
        loss_of(module(**kwargs)).backward()
        optimizer.step()
    for ours, theirs in zip(sharded.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    with pytest.raises(OptionsError, match="that the original model does not have"):
        sharded.rebind(stranger)


# --- copies -------------------------------------------------------------------------------------


def test_a_deep_copy_is_a_module_of_its_own() -> None:
    model, kwargs = to_double(gpt2())
    sharded = shard(model, kwargs)
    sharded(**kwargs)
    copied = copy.deepcopy(sharded)
    assert copied.lm_head.weight is copied.transformer.wte.weight
    assert copied.plan is sharded.plan
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    assert_trains_alike(model, copied, kwargs)
    assert_trains_alike(
        model,
        copied,
        {**kwargs, "input_ids": kwargs["input_ids"][:2], "labels": kwargs["labels"][:2]},
    )


def test_pickling_says_what_to_do() -> None:
    sharded = shard(*mlp())
    with pytest.raises(OptionsError, match=r"cannot be pickled[\s\S]*full_state_dict"):
        pickle.dumps(sharded)


def test_sharding_twice_is_an_error() -> None:
    model, kwargs = mlp()
    with pytest.raises(OptionsError, match="sharded already"):
        shard(shard(model, kwargs), kwargs)


def test_check_inputs_is_checked() -> None:
    model, kwargs = mlp()
    sharded = shard(model, kwargs)
    sharded.check_inputs = "sometimes"
    with pytest.raises(OptionsError, match="check_inputs is 'sometimes'"):
        sharded(**kwargs)
