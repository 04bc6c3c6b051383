"""The comparison that decides: same weights, unsharded against sharded, written without `autoshard.verify`.

Outputs, every gradient, every parameter after each of two optimizer steps, every buffer, and the ties.
Many faults pass the forward alone and fail the rest. It runs as it is on the ranks of a process group too,
where what is sharded is a `DTensor`: each is gathered before it is compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

from autoshard import Plan, ShardedModule, autoshard

IDEAL_TENSOR = {"hardware": "ideal", "search": "tensor"}
IDEAL_ALL = {"hardware": "ideal", "search": "all"}
H100 = {"hardware": "h100-sxm", "search": "tensor"}

SMALL = 1e-3
"""A gradient that is zero in exact arithmetic is compared with this share of the largest one."""


def assert_sound(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    ranks: int = 2,
    bound: float = 1e-9,
    steps: int = 2,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> ShardedModule:
    """Shard `model` in float64 and train it beside itself; gives back the sharded module."""
    args, kwargs = _cast((args, dict(kwargs or {})), dtype)
    reference = copy.deepcopy(model).to(dtype)
    sharded = autoshard(
        copy.deepcopy(reference), ranks, args, kwargs, **{**IDEAL_TENSOR, **options}
    )
    assert ties(sharded) == ties(reference)
    for module in (reference, sharded):
        module.optimizer = (
            torch.optim.SGD(module.parameters(), 0.05, 0.9) if has_parameters(module) else None
        )  # type: ignore[assignment]
    for step in range(steps):
        wanted, found = (
            reference(*_copy(args), **_copy(kwargs)),
            sharded(*_copy(args), **_copy(kwargs)),
        )
        _assert_same_structure(found, wanted)
        _assert_close(f"step {step}, output", _named(found), _named(wanted), bound)
        trains = _loss(wanted) is not None
        assert trains == (_loss(found) is not None), "one of them has no gradient"
        if trains:
            for module, out in ((reference, wanted), (sharded, found)):
                if module.optimizer:  # type: ignore[union-attr]
                    module.optimizer.zero_grad()  # type: ignore[union-attr]
                _loss(out).backward()  # type: ignore[union-attr]
            floor = _assert_gradients(step, reference, sharded, bound)
            for module in (reference, sharded):
                if module.optimizer:  # type: ignore[union-attr]
                    module.optimizer.step()  # type: ignore[union-attr]
            ours, theirs = dict(sharded.named_parameters()), dict(reference.named_parameters())
            _assert_close(f"step {step}, parameter", ours, theirs, bound, 0.05 * floor)
        ours, theirs = dict(sharded.named_buffers()), dict(reference.named_buffers())
        _assert_close(f"step {step}, buffer", {n: b for n, b in ours.items() if n in theirs}, {n: b for n, b in theirs.items() if n in ours}, bound)  # fmt: skip
    return sharded


def doubled(model: nn.Module, args: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
    """A copy of `model`, and what it is given, in float64: as `assert_sound` shards it."""
    return copy.deepcopy(model).double(), _cast(args, torch.float64)


def has_parameters(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def ties(module: nn.Module) -> list[list[str]]:
    """The groups of names that are one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values())


def split_share(plan: Plan) -> float:
    """The share of the bytes of weights with two or more dimensions that are stored split."""
    matrices = [w for w in plan.weights if len(w.shape) > 1]
    whole = sum(math.prod(w.shape) for w in matrices)
    split = sum(math.prod(w.shape) for w in matrices if w.split != "replicated")
    return split / whole if whole else 1.0


def splits(plan: Plan) -> dict[str, str]:
    """Each weight's split, by its first name."""
    return {w.fqn: w.split for w in plan.weights}


def placements(plan: Plan) -> dict[str, str]:
    """Each weight's placement, by its first name."""
    return {w.fqn: str(w.placements[0]) for w in plan.weights}


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.detach().to(dtype).requires_grad_(x.requires_grad)
        return x

    return tree_map(cast, tree)


def _copy(tree: Any) -> Any:
    def copied(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    return tree_map(copied, tree)


def _whole(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x


def _named(out: Any) -> dict[str, Tensor]:
    return {str(i): x for i, x in enumerate(tree_flatten(out)[0]) if isinstance(x, Tensor)}


def _assert_same_structure(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    assert tree_flatten(found)[1] == tree_flatten(wanted)[1]


def _loss(out: Any) -> Tensor | None:
    """A sum that weighs every element of every output differently."""
    total = None
    for index, x in enumerate(_named(out).values()):
        if x.is_floating_point() and x.requires_grad and x.numel():
            weights = torch.rand(
                x.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64
            )
            term = (x.double() * weights).sum() / x.numel() ** 0.5
            total = term if total is None else total + term
    return total


def _assert_gradients(step: int, reference: nn.Module, sharded: nn.Module, bound: float) -> float:
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    found = {n: p.grad for n, p in sharded.named_parameters() if p.grad is not None}
    for name in sorted(set(found) - set(wanted)):
        assert not _whole(found.pop(name)).any(), f"{name} has a gradient, and should have none"
    floor = SMALL * max([float(g.abs().max()) for g in wanted.values() if g.numel()], default=0.0)
    _assert_close(f"step {step}, gradient", found, wanted, bound, floor)
    return floor


def _assert_close(
    what: str,
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    bound: float,
    floor: float = 0.0,
) -> None:
    assert set(found) == set(wanted), f"{what}: {sorted(set(found) ^ set(wanted))} on one side only"
    wrong = {}
    for name, b in wanted.items():
        a = _whole(found[name])
        assert a.shape == b.shape, f"{what} {name}: {list(a.shape)}, wanted {list(b.shape)}"
        assert a.dtype == b.dtype, f"{what} {name}: {a.dtype}, wanted {b.dtype}"
        x, y = (torch.view_as_real(t) if t.is_complex() else t for t in (a.detach(), b.detach()))
        x, y = x.double(), y.double()
        if torch.equal(x, y) or not y.numel():
            continue
        same = torch.isclose(x, y, rtol=0, atol=0, equal_nan=True)
        off = (x - y).abs().masked_fill(same, 0.0)
        scale = max(float(y.abs().nan_to_num(0, 0, 0).max()), floor, 1e-300)
        error = float(off.max()) / scale
        if not error <= bound:
            wrong[name] = f"{error:.2e}"
    assert not wrong, f"{what}: off by more than {bound:g}: {wrong}"
