"""Training on real gloo processes gives what training the unsharded model gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import MODELS
from processes import run_ranks
from torch import Tensor, nn

import autoshard

BOUND = 1e-5
FLOOR = 1e-3
"""A gradient's error is relative to its own largest element, but to no less than this share of the
largest of the model."""
NOISE = 1e-4
"""Elements whose gradient is below this share of their tensor's largest are left out of the parameters'
error. AdamW divides a gradient by its own size: where the exact gradient is zero (a key's bias under
softmax moves every score of a query alike) it makes whole steps of rounding noise, in whichever direction,
and no two programs round alike. Such an element is only held to the length of those steps."""
STEPS, RATE, MAX_NORM = 3, 1e-4, 0.5

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def loss_of(out: Any) -> Tensor:
    """A loss that every output takes part in."""
    tensors = [
        x for x in (out.values() if hasattr(out, "values") else [out]) if isinstance(x, Tensor)
    ]
    return sum(
        (x.float() * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).mean() for x in tensors
    )


def error(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    return float((found - wanted).abs().max() / max(float(wanted.abs().max()), floor, 1e-30))


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def perturb(model: nn.Module) -> None:
    """Leave no parameter at zero or one: a bias that is added twice would not show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def train(
    model: nn.Module,
    sharded: nn.Module,
    kwargs: dict[str, Any],
    optimizer: dict[str, Any],
    max_norm: float = MAX_NORM,
) -> tuple[dict[str, float], list[int]]:
    """Errors of three steps of AdamW, sharded against unsharded; on copies of both."""
    reference, sharded = copy.deepcopy(model), copy.deepcopy(sharded)
    assert [n for n, _ in sharded.named_parameters()] == [n for n, _ in model.named_parameters()]
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=RATE, **optimizer) for m in (reference, sharded)
    ]
    worst: dict[str, float] = {}
    firm: dict[str, Any] = {}

    def note(what: str, value: float) -> None:
        worst[what] = max(worst.get(what, 0.0), value)

    for step in range(STEPS):
        wanted, found = reference(**kwargs), sharded(**kwargs)
        assert type(wanted) is type(found)
        for name in wanted:
            if isinstance(wanted[name], Tensor):
                note("output", error(found[name].detach(), wanted[name].detach()))
        for out in (wanted, found):
            loss_of(out).backward()
        ours = dict(sharded.named_parameters())
        largest = max(float(p.grad.abs().max()) for p in reference.parameters())
        for name, parameter in reference.named_parameters():
            found_grad = full(ours[name].grad)
            assert ours[name].grad.placements == ours[name].placements
            note("gradient", error(found_grad, parameter.grad, FLOOR * largest))
            size = parameter.grad.abs()
            firm[name] = firm.get(name, True) & (
                size >= NOISE * max(float(size.max()), FLOOR * largest)
            )
        norms = [nn.utils.clip_grad_norm_(m.parameters(), max_norm) for m in (reference, sharded)]
        note("norm", error(full(norms[1]), norms[0]))
        assert float(norms[0]) > max_norm or step, "the first step should clip"
        for each in optimizers:
            each.step()
            each.zero_grad()
        for name, parameter in reference.named_parameters():
            off = (full(ours[name].detach()) - parameter.detach()).abs()
            note("parameter", float((off * firm[name]).max() / parameter.detach().abs().max()))
            note("noise", float(off.max() / (2.1 * RATE * (step + 1))) * BOUND)
        buffers = dict(sharded.named_buffers())
        for name, buffer in reference.named_buffers():
            if name in buffers and buffer.is_floating_point():
                note("buffer", error(full(buffers[name]), buffer))
    counts = [sum(int(f.sum()) for f in firm.values()), sum(f.numel() for f in firm.values())]
    return worst, counts


OPTIMIZERS = {"foreach": {"foreach": True}, "fused": {"fused": True}}


def train_each(model_name: str) -> dict[tuple[str, str], tuple[dict[str, float], list[int]]]:
    model, kwargs = MODELS[model_name]()
    perturb(model)
    world, found = torch.distributed.get_world_size(), {}
    for search in ("tensor", "all"):
        sharded = autoshard.autoshard(model, world, kwargs=kwargs, hardware="ideal", search=search)
        for name, options in OPTIMIZERS.items():
            found[search, name] = train(model, sharded, kwargs, options)
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", ["llama", "gpt2", "resnet"])
def test_three_steps_of_adamw(model: str, size: int) -> None:
    for rank, found in enumerate(run_ranks(train_each, size, model)):
        for case, (worst, (firm, count)) in found.items():
            assert max(worst.values()) <= BOUND, (rank, case, worst)
            assert firm > 0.5 * count
