"""What is captured is what eager runs: regions, Functions, caches, writes; and capture is quick."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from models import MODELS, bert, encoder_layer, gpt2, llama, llama_8b
from oracle import IDEAL_ALL, IDEAL_TENSOR, assert_sound
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard import CaptureError
from autoshard.capture import Captured, capture
from autoshard.capture.canonical import canonicalize
from autoshard.capture.convert import convert, trained
from autoshard.capture.shims import capturing

BOTH = pytest.mark.parametrize("options", [IDEAL_TENSOR, IDEAL_ALL], ids=["tensor", "all"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def targets(captured: Captured) -> list[str]:
    return [op.target for op in captured.graph.ops if op.kind == "call"]


class Two(nn.Module):
    """Two layers, and something done with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)


# --- custom autograd.Functions --------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """The identity, with another gradient than the identity's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


class Scaled(torch.autograd.Function):
    """Two tensors in, two out; saved tensors, and one result without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return x * weight, signs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 3 * gradient * weight, (gradient * x).sum(0)


class OwnDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) > 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


reverse = Reversed.apply


class WithFunctions(Two):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        y = reverse(self.a(x), 2.0)
        z, signs = Scaled.apply(y, self.scale)
        with torch.no_grad():
            factor = Reversed.apply(y, 3.0)
        return self.b(z) + signs + factor + Reversed.apply(z, 4.0)


@BOTH
@pytest.mark.parametrize("ranks", [2, 3])
def test_custom_functions_keep_their_backward(ranks: int, options: dict[str, str]) -> None:
    sharded = assert_sound(WithFunctions(), (torch.randn(4, 12),), ranks=ranks, **options)
    named = {f.op for f in sharded.plan.fallbacks}
    assert "autograd_function.Scaled.default" in named
    assert any(op.startswith("autograd_function.Reversed") for op in named)


def test_a_random_function_draws_the_same_in_backward() -> None:
    class Model(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(OwnDropout.apply(self.a(x)))

    model, x = Model().double(), torch.randn(4, 12, dtype=torch.float64)
    sharded = autoshard.autoshard(copy.deepcopy(model), 2, (x,), **IDEAL_TENSOR)
    for module in (model, sharded):
        torch.manual_seed(1)
        module(x).square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)


def test_a_function_is_applied_as_before_after_a_capture() -> None:
    before = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    capture(WithFunctions(), (torch.randn(4, 12),))
    with pytest.raises(CaptureError):
        capture(WithFunctions(), (torch.randn(4, 7),))
    assert torch.autograd.Function.apply.__func__.__code__ is before  # type: ignore[attr-defined]
    x = torch.ones(3, requires_grad=True)
    reverse(x, 2.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [-2.0, -2.0, -2.0]


class InAList(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, xs: list[Tensor], y: Tensor) -> Tensor:
        return xs[0] + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class GivesANumber(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, int]:
        return x * 2, 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize(
    ("function", "says"),
    [(Writes, "writes to what it is given"), (GivesANumber, "gives back what is no tensor")],
)
def test_functions_that_cannot_be_kept_are_named(function: Any, says: str) -> None:
    class Model(Two):
        def forward(self, x: Tensor) -> Any:
            return function.apply(self.a(x) * 1)

    with pytest.raises(CaptureError, match=f"{function.__name__}.*{says}") as caught:
        capture(Model(), (torch.randn(4, 12),))
    assert "test_capture.py" in caught.value.where


def test_a_function_with_trained_tensors_in_a_list_is_named() -> None:
    class Model(Two):
        def forward(self, x: Tensor) -> Tensor:
            return InAList.apply([self.a.weight], self.b(x))

    with pytest.raises(CaptureError, match="InAList takes tensors inside"):
        capture(Model(), (torch.randn(12, 12),))


def test_hooks_inside_forward_are_refused() -> None:
    class Hooked(Two):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y.register_hook(lambda gradient: gradient * 2)
            return self.b(y)

    with pytest.raises(CaptureError, match="hook is registered") as caught:
        capture(Hooked(), (torch.randn(4, 12),))
    assert "y.register_hook" in caught.value.where
    model = nn.Sequential(nn.Linear(12, 12))
    handle = model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="module 0 has a backward hook"):
        capture(model, (torch.randn(4, 12),))
    handle.remove()
    capture(model, (torch.randn(4, 12),))


# --- regions --------------------------------------------------------------------------------------


class NoGrad(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            z = y * self.b.weight.sum()
            with torch.enable_grad():
                w = self.b(y)
            z.add_(1)
        return y + z + w


class NoGradNested(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            z = y * 2
            with torch.no_grad():
                v = self.b(z)
            y2 = y
        with torch.set_grad_enabled(False), torch.set_grad_enabled(True):
            u = self.b(y2)
        return y2 + z * v + u


class NoGradWrites(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            y[:, :3] = 0
            y.mul_(2)
        return self.b(y) + y


class NoGradGivesBack(Two):
    """What gives back the very tensor it takes does not stop a gradient: that tensor is taken later."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            one = self.b(y.to(x.dtype)) + F.dropout(y, 0.5, training=False).contiguous()
        return self.b(y).tanh() * one + y


class Inference(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = self.a(x)
        return self.b(x) + y.clone()


class InferenceDecorator(Two):
    @torch.inference_mode()
    def part(self, x: Tensor) -> Tensor:
        return self.a(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * self.part(x).clone()


class Checkpointed(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.a, x, use_reentrant=False)
        return checkpoint(self.b, y, use_reentrant=True) + y


@BOTH
@pytest.mark.parametrize(
    "kind",
    [
        NoGrad,
        NoGradNested,
        NoGradWrites,
        NoGradGivesBack,
        Inference,
        InferenceDecorator,
        Checkpointed,
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_regions_of_gradients(kind: type[nn.Module], options: dict[str, str]) -> None:
    x = torch.randn(4, 12, requires_grad=kind is Checkpointed)
    assert_sound(kind(), (x,), **options)


class Autocast(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.a(x)
            scores = F.scaled_dot_product_attention(y[None], y[None], x[None])
            z = y.softmax(-1) @ self.b.weight
            w = torch.einsum("ij,kj->ik", x, self.b.weight)
            with torch.autocast("cpu", enabled=False):
                v = self.b(x)
            with torch.no_grad():
                u = self.b(y)
            t = F.layer_norm(y, (12,)) + x
            joined = torch.cat((y, x))
            product = torch.addmm(self.b.bias, x, self.b.weight)
        return self.b(z.float()), scores, w, v, u, t, joined, F.mse_loss(y, x.to(y.dtype)), product


class AutocastInside(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.b(self.a(x.float()))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [Autocast, AutocastInside])
def test_autocast_regions(kind: type[nn.Module], ranks: int) -> None:
    """In float32, where autocast has something to do; whole on one rank, it is the very same."""
    model, x = kind(), torch.randn(12, 12)
    sharded = autoshard.autoshard(copy.deepcopy(model), ranks, (x,), **IDEAL_TENSOR)
    wanted, found = model(x), sharded(x)
    bound = {"rtol": 2e-2, "atol": 2e-2} if ranks > 1 else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(found, wanted, **bound)
    for out in (wanted, found):
        outs = out if isinstance(out, tuple) else (out,)
        sum(o.float().sum() for o in outs if o.requires_grad).backward()
    for (name, a), b in zip(model.named_parameters(), sharded.parameters(), strict=True):
        # Sums of bfloat16 gradients, in another order.
        assert (a.grad - b.grad).abs().max() <= 2e-2 * a.grad.abs().max(), name


def test_autocast_shows_in_the_graph() -> None:
    captured = capture(Autocast(), (torch.randn(12, 12),))
    ops = {op.name: op for op in captured.graph.ops}
    casts = [op for op in ops.values() if op.target == "aten.to.dtype"]
    assert len(casts) >= 5
    products = [op for op in ops.values() if op.target == "aten.linear.default"]
    assert {op.results[0].dtype for op in products if op.results[0]} == {"bfloat16", "float32"}


# --- caches, layer drop, dropout -----------------------------------------------------------------


def test_a_cache_is_left_out_unless_it_is_asked_for() -> None:
    model, kwargs = llama()
    kwargs.pop("use_cache")
    found = autoshard.plan(model, 2, (), kwargs, hardware="ideal")
    assert any("cache" in note for note in found.notes)
    assert model.config.use_cache is True
    sharded = autoshard.autoshard(model, 2, (), kwargs, plan=found)
    assert sharded(**kwargs).past_key_values is None
    kept = autoshard.autoshard(model, 2, (), {**kwargs, "use_cache": True})
    wanted = model(**kwargs, use_cache=True).past_key_values
    cache = kept(**kwargs, use_cache=True).past_key_values
    assert type(cache) is type(wanted)
    for mine, theirs in zip(cache.layers, wanted.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys)


def test_layer_drop_is_off_and_noted() -> None:
    from transformers import BartConfig, BartModel

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(
        vocab_size=32, d_model=16, max_position_embeddings=32, encoder_layerdrop=0.5,
        decoder_layerdrop=0.5, dropout=0.0, **sizes, **heads,
    )  # fmt: skip
    model = BartModel(config).train()
    found = autoshard.plan(model, 2, (), {"input_ids": torch.randint(3, 32, (2, 6))})
    assert any("Layer drop" in note for note in found.notes)
    assert model.encoder.layerdrop == model.config.encoder_layerdrop == 0.5


class Drops(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.a(x), 0.3, training=self.training) * torch.rand_like(x)
        z = F.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=0.2)[0]
        return self.b(F.alpha_dropout(z, 0.1, training=True)) + F.dropout1d(y[None], 0.5)[0]


@BOTH
def test_verify_tells_masks_from_faults(options: dict[str, str]) -> None:
    for model in (Drops(), nn.TransformerEncoderLayer(12, 2, 24, 0.3, batch_first=True)):
        args = (
            (torch.randn(1, 6, 12),)
            if isinstance(model, nn.TransformerEncoderLayer)
            else (torch.randn(6, 12),)
        )
        found = autoshard.verify(model, 2, args, **options)
        assert found.ok, found
        assert found.max_gradient_error > 0
    model, kwargs = gpt2(dropout=0.1)
    assert autoshard.verify(model, 2, (), kwargs, **options).ok


def test_verify_finds_a_fault_beside_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoshard.runtime import lowerings

    wrong = lambda comm, xs, dim, blocks, length: [x * 2 for x in xs]  # noqa: E731
    assert callable(lowerings.split_dropout)
    monkeypatch.setitem(simulated(), "shard_to_invariant", wrong)
    found = autoshard.verify(Drops(), 2, (torch.randn(6, 12),), **IDEAL_TENSOR)
    assert not found.ok


def simulated() -> dict[str, Any]:
    from autoshard.runtime.operators import IMPLEMENTATIONS

    return IMPLEMENTATIONS


def test_numbers_drawn_in_python_are_noted() -> None:
    import random

    class Draws(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * random.random()

    found = autoshard.plan(Draws(), 2, (torch.randn(4, 12),))
    assert any("Python or NumPy" in note for note in found.notes)
    assert not autoshard.plan(Plain(), 2, (torch.randn(4, 12),)).notes


class Plain(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


# --- inputs, buffers, modes -------------------------------------------------------------------------


class Optional(Two):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, flags: Any = None
    ) -> Any:
        y = self.a(x) * scale
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return {"y": self.b(y), "flags": flags, "none": None, "n": 3, "pair": (y, [x])}


@BOTH
def test_inputs_that_are_no_tensors(options: dict[str, str]) -> None:
    x = torch.randn(4, 12)
    for kwargs in ({}, {"mask": None, "scale": 2.0}, {"mask": x > 0, "flags": {"a": [1, "b"]}}):
        assert_sound(Optional(), (x,), kwargs, steps=1, **options)


def test_positional_and_keyword_inputs() -> None:
    assert_sound(Optional(), (torch.randn(4, 12), None, 3.0), {"flags": (1, 2)}, steps=1)


@pytest.mark.parametrize("real", ["model", "inputs"])
def test_the_meta_device_on_one_side(real: str) -> None:
    model, x = Plain(), torch.randn(4, 12)
    whole = autoshard.plan(model, 2, (x,), hardware="ideal")
    if real == "inputs":
        model = model.to("meta")
    else:
        x = x.to("meta")
    assert autoshard.plan(model, 2, (x,), hardware="ideal") == whole


class PlainTensors(Two):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.arange(12.0)
        self.nested = {"table": torch.arange(4)}
        self.register_buffer("kept", torch.ones(12))
        self.register_buffer("dropped", torch.ones(12), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) * self.plain.to(x.dtype) + self.kept * self.dropped
        return self.b(y)[self.nested["table"]] + torch.tensor([1.0, 2.0, 3.0] * 4, dtype=x.dtype)


@BOTH
def test_plain_tensors_and_literals(options: dict[str, str]) -> None:
    sharded = assert_sound(PlainTensors(), (torch.randn(4, 12),), **options)
    assert list(sharded.state_dict()) == list(PlainTensors().state_dict())


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "resnet"])
def test_capturing_twice_gives_the_same_text(name: str) -> None:
    texts = []
    for _ in range(2):
        model, kwargs = MODELS[name]()
        captured = capture(model, (), kwargs)
        captured.graph.verify()
        texts.append(captured.graph.text())
    assert texts[0] == texts[1]


def test_attributes_that_forward_changes_are_as_before_and_noted() -> None:
    class Remembers(Plain):
        last = None

        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen = 0, {}

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen[x.shape] = self.calls
            return super().forward(x) * (2 if self.calls > 1 else 1)

    model = Remembers()
    seen = model.seen
    found = autoshard.plan(model, 2, (torch.randn(4, 12),))
    assert model.calls == 0
    assert model.last is None
    assert model.seen is seen
    assert not seen
    assert [note for note in found.notes if "calls" in note]


def test_nothing_of_the_model_is_changed() -> None:
    for build in (gpt2, bert):
        model, kwargs = build()
        before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
        identities = [id(p) for p in model.parameters()]
        sharded = autoshard.autoshard(model, 2, (), kwargs, hardware="ideal")
        sharded(**kwargs).loss.backward()
        torch.optim.SGD(sharded.parameters(), 0.1).step()
        assert [id(p) for p in model.parameters()] == identities
        assert [m.training for m in model.modules()] == modes
        assert all(p.grad is None for p in model.parameters())
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_the_modes_are_captured_apart() -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Dropout(0.5), nn.Linear(24, 12))
    x = torch.randn(8, 12)
    sharded = autoshard.autoshard(copy.deepcopy(model), 2, (x,), hardware="ideal")
    model(x), sharded(x)
    model.eval(), sharded.eval()
    torch.testing.assert_close(sharded(x), model(x))
    sharded.train()
    assert not torch.equal(sharded(x), sharded(x))


def test_other_shapes_are_captured_again_with_the_weights_where_they_are() -> None:
    model, kwargs = encoder_layer()
    sharded = autoshard.autoshard(copy.deepcopy(model), 2, (), kwargs, hardware="ideal")
    for shape in ((2, 5, 64), (1, 16, 64), (4, 16, 64)):
        x = torch.randn(*shape)
        torch.testing.assert_close(sharded(src=x), model(src=x))


class Assigns(Plain):
    """Buffers given new tensors, rather than written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.steps = self.steps + 1
        return y - self.mean + self.steps


@BOTH
def test_buffers_that_are_assigned(options: dict[str, str]) -> None:
    assert_sound(Assigns(), (torch.randn(4, 12),), **options)


def test_unused_inputs_and_weights() -> None:
    class Unused(Two):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x)

    assert_sound(Unused(), (torch.randn(4, 12), torch.randn(3)))


def test_outputs_that_are_inputs_weights_or_the_same() -> None:
    class Gives(Two):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.a(x)
            return x, y, y, self.b.weight, y.detach(), y[:, :3]

    assert_sound(Gives(), (torch.randn(4, 12),))


# --- speed ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_capture_adds_to_export_is_small() -> None:
    model, kwargs = llama_8b(layers=32, sequence=128)
    started = time.process_time()
    with capturing(model, kwargs, []):
        program = torch.export.export(model, (), kwargs, strict=False)
    exported = time.process_time()
    canonicalize(program.graph_module, trained(program))
    convert(program, model)
    share = (time.process_time() - exported) / (exported - started)
    assert share < 0.3, f"{share:.2f} of the time of export"
