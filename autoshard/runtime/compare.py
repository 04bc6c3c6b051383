"""Compare a sharded module, in the simulator, with the model it came from."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.capture import Captured
from autoshard.compat import tree_flatten, tree_map
from autoshard.errors import VerifyError
from autoshard.runtime.backend import graph_module
from autoshard.runtime.divergence import first_divergence
from autoshard.runtime.errors import relative, weighted_sum
from autoshard.runtime.masks import has_masks, leave_out_masks
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.verification import Verification

LEARNING_RATE, MOMENTUM = 0.1, 0.9
SMALL = 1e-3
"""Errors are relative to a tensor's own size, but to no less than this share of the largest gradient.

A gradient that is zero in exact arithmetic (a key's bias under a softmax) is rounding noise: nothing is
learnt from dividing by it.
"""


@dataclass(frozen=True)
class Trial:
    """A model and inputs to compare on, in one precision.

    Attributes:
        model: a copy of the user's, in `dtype`.
        args, kwargs: the inputs, floats in `dtype`.
        dtype: float64 where the model runs in it, else float32.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype


def as_trial(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Trial:
    """The model and inputs in float64, or in float32 where an operator has no float64.

    Raises:
        VerifyError: the model is on the meta device, or does not run on these inputs.
    """
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise VerifyError(
            "A model on the meta device has no values to compare.", fix="Build it on a real device."
        )
    error: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        own = copy.deepcopy(model).to(dtype)
        given = tree_map(lambda x: _cast(x, dtype), (tuple(args), dict(kwargs or {})))  # noqa: B023
        trial = Trial(own, given[0], given[1], dtype)
        try:
            with torch.no_grad():
                copy.deepcopy(own)(*_copies(trial.args), **_copies(trial.kwargs))
        except RuntimeError as failed:
            error = failed
        else:
            return trial
    raise VerifyError(f"The model does not run on these inputs: {error}") from error


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().to(dtype).requires_grad_(x.requires_grad)
    return x


def _copies(tree: Any) -> Any:
    return tree_map(
        lambda x: (
            x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        ),
        tree,
    )


def compare(trial: Trial, sharded: ShardedModule, tolerance: float | None) -> Verification:
    """Outputs, gradients and parameters after one step of SGD with momentum, sharded and not.

    Where the model drops at random, the captured graph is compared with the model under one seed, and the
    sharded program with the captured graph with nothing dropped on either side: the ranks' masks are
    their own.
    """
    prepared = sharded.first_prepared
    captured = prepared.captured
    bound = tolerance if tolerance is not None else _tolerance(trial, sharded)
    reference = copy.deepcopy(trial.model)
    captures = 0.0
    if has_masks(captured.fx_graph):
        captures = _capture_error(trial, captured)
        leave_out_masks(captured.fx_graph)
        leave_out_masks(prepared.program.graph)
        reference = _by_graph(captured, copy.deepcopy(trial.model))
    output, wanted, found = _outputs(trial, reference, sharded)
    gradients, update = _train(reference, sharded, wanted, found)
    output, worst = max(output, captures), max(gradients.values(), default=0.0)
    ok = output <= bound and worst <= bound and update <= bound
    where = None if ok else first_divergence(sharded, trial, bound)
    if captures > bound and where is None:
        where = "none: the graph that was captured is not what the model computes"
    ranks = sharded.plan.mesh.size
    return Verification(ok, output, worst, update, gradients, where, bound, ranks)


def _capture_error(trial: Trial, captured: Captured) -> float:
    """How far the captured graph is from the model itself, under one seed."""
    model, same = copy.deepcopy(trial.model), _by_graph(captured, copy.deepcopy(trial.model))
    output, wanted, found = _outputs(trial, model, same)
    gradients, update = _train(model, same, wanted, found)
    return max(output, update, *gradients.values())


def _outputs(
    trial: Trial, reference: nn.Module, other: nn.Module
) -> tuple[float, list[Tensor], list[Tensor]]:
    """The worst error of the outputs of `other`, under one seed; the outputs of both."""
    outs = []
    for module in (reference, other):
        args, kwargs = _copies((trial.args, trial.kwargs))
        torch.manual_seed(0)
        outs.append(_tensors(module(*args, **kwargs)))
    wanted, found = outs
    if len(wanted) != len(found):
        raise VerifyError(f"{len(found)} output tensors, where the model has {len(wanted)}.")
    pairs = zip(found, wanted, strict=True)
    return max([relative(a, b) for a, b in pairs], default=0.0), wanted, found


def _by_graph(captured: Captured, model: nn.Module) -> nn.Module:
    """`model`, run by the graph that was captured of it rather than by itself."""
    module = graph_module(captured.fx_graph)
    stored = {**dict(model.named_parameters(remove_duplicate=False))}
    stored |= dict(model.named_buffers(remove_duplicate=False))
    held = {
        op.name: stored[op.fqns[0]] for op in captured.graph.ops if op.fqns and op.fqns[0] in stored
    }
    names = [node.name for node in captured.fx_graph.nodes if node.op == "placeholder"]

    def forward(*args: Any, **kwargs: Any) -> Any:
        flat = tree_flatten((args, kwargs))[0]
        given = dict(zip([name for name, _ in captured.inputs], flat, strict=True))
        leaves = {**captured.tensors, **held, **given}
        return module(*[leaves.get(name) for name in names])

    model.forward = forward
    return model


def _tolerance(trial: Trial, sharded: ShardedModule) -> float:
    """1e-9 in float64; looser where the model casts to float32 itself, or has to run in it."""
    if trial.dtype != torch.float64:
        return 1e-4
    ops = sharded.first_prepared.captured.graph.ops
    casts = any(
        m and m.grad and m.dtype in ("float32", "bfloat16", "float16")
        for op in ops
        for m in op.results
    )
    return 1e-5 if casts else 1e-9


def _tensors(out: Any) -> list[Tensor]:
    return [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]


def _train(
    reference: nn.Module, sharded: nn.Module, wanted: list[Tensor], found: list[Tensor]
) -> tuple[dict[str, float], float]:
    """The error of each gradient, and the worst of the parameters after a step."""
    loss, mine = weighted_sum(wanted), weighted_sum(found)
    if loss is None or mine is None:
        return {}, 0.0
    loss.backward()
    mine.backward()
    ours = dict(sharded.named_parameters())
    grads = [p.grad for p in reference.parameters() if p.grad is not None and p.grad.numel()]
    floor = SMALL * max([float(g.abs().max()) for g in grads], default=0.0)
    gradients = {
        name: _gradient_error(ours[name].grad, parameter.grad, floor)
        for name, parameter in reference.named_parameters()
    }
    for module in (reference, sharded):
        torch.optim.SGD(module.parameters(), LEARNING_RATE, MOMENTUM).step()
    pairs = [(ours[name].detach(), p.detach()) for name, p in reference.named_parameters()]
    buffers = dict(sharded.named_buffers())
    pairs += [(buffers[name], b) for name, b in reference.named_buffers() if name in buffers]
    return gradients, max([relative(a, b, floor * LEARNING_RATE) for a, b in pairs], default=0.0)


def _gradient_error(found: Tensor | None, wanted: Tensor | None, floor: float) -> float:
    if wanted is None:
        return 0.0 if found is None or not found.numel() else float(found.abs().max())
    return float("inf") if found is None else relative(found, wanted, floor)
