"""Prepare a program for new input shapes or another mode, with the weights where they are."""

from __future__ import annotations

import copy
import glob
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard.capture import capture
from autoshard.cost.hardware import load_hardware
from autoshard.placement import Shard
from autoshard.plan_types import Plan
from autoshard.planner import Options, decide
from autoshard.rewrite import rewrite
from autoshard.runtime.backend import Backend
from autoshard.runtime.sharded_module import Prepare, Prepared


def preparer(model: nn.Module, plan: Plan, backend: Backend, options: Options | None) -> Prepare:
    """A function that captures the model again and plans around the weights as `plan` stores them.

    The model is kept as a skeleton on the meta device: neither its tensors nor the caller's changes
    to it are.
    """
    skeleton = _skeleton(model)
    base = options or Options(plan.mesh, load_hardware("h100-sxm"), plan.mode, plan.search)
    stored = tuple((glob.escape(fqn), _pin(w.placements[0])) for w in plan.weights for fqn in w.fqns)
    wanted = replace(base, constraints=stored, memory_budget_bytes=None, uniform=plan.uniform)

    def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Prepared:
        again = copy.deepcopy(skeleton).train(training)
        captured = capture(again, args, kwargs)
        decided = decide(captured.graph, wanted)
        device = backend.device or _device(model)
        return Prepared(captured, rewrite(captured, decided, device))

    return prepare


def _pin(placement: object) -> str:
    if isinstance(placement, Shard):
        return f"shard({placement.dim},{placement.blocks})"
    return "replicated"


def _device(model: nn.Module) -> torch.device:
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model whose tensors are on the meta device; ties are kept."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in memo:
            empty = torch.empty_like(tensor, device="meta", requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)
