"""Prepare a program for new input shapes, modes or dtypes, with the weights where they are."""

from __future__ import annotations

import copy
import glob
import logging
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.capture import capture
from autoshard.compat import FakeTensorMode, tensor_tables, tree_map
from autoshard.cost.hardware import load_hardware
from autoshard.errors import CaptureError, OptionsError
from autoshard.placement import Shard
from autoshard.plan_types import Plan
from autoshard.planner import Options, decide
from autoshard.rewrite import rewrite
from autoshard.runtime.backend import Backend
from autoshard.runtime.sharded_module import Prepared

log = logging.getLogger("autoshard")


class Original:
    """What is kept of the caller's model: no tensor, and nothing through which it could be changed.

    Attributes:
        modes: whether each submodule is in train mode, by every name it has, in the model's order.
        again: for further names of a submodule, its first.
        names: FQNs of parameters, then of buffers, in the model's order; all names of tied ones.
        sources: the caller's parameters by FQN, as long as the caller keeps them.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, backend: Backend, options: Options | None
    ) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        first: dict[int, str] = {}
        self.modes = {name: module.training for name, module in modules.items()}
        names = {name: first.setdefault(id(module), name) for name, module in modules.items()}
        self.again = {name: known for name, known in names.items() if name != known}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.names = (*parameters, *(n for n, _ in model.named_buffers(remove_duplicate=False)))
        self.sources = {name: weakref.ref(p) for name, p in parameters.items()}
        self._backend = backend
        self._options = _options(plan, options)
        self._skeleton = _skeleton(model)

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        modes: Mapping[str, bool],
        stored: Mapping[str, Tensor],
    ) -> Prepared:
        """Capture the model again and plan around the weights as they are stored.

        Args:
            args, kwargs: what the module is called with.
            modes: of each submodule.
            stored: the sharded module's parameters and buffers, by every name: dtypes, devices and
                `requires_grad` are taken from them.

        Raises:
            CaptureError: the model cannot be captured on these inputs, or could not be kept.
            PlanError: the ranks decide differently.
        """
        log.info("New input shapes, modes or dtypes: the model is captured and planned again.")
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        model = self._model(fake, stored)
        for name, module in model.named_modules():
            module.training = modes[name]
        given = tree_map(
            lambda x: fake.from_tensor(x) if isinstance(x, Tensor) else x, (args, kwargs)
        )
        captured = capture(model, *given)
        decided = decide(captured.graph, self._options)
        self._backend.compare(
            "programs for these inputs", f"{captured.graph.fingerprint} {decided.choice}"
        )
        return Prepared(captured, rewrite(captured, decided, self._backend.device))

    def _model(self, fake: FakeTensorMode, stored: Mapping[str, Tensor]) -> nn.Module:
        """The model with fake tensors: whole, on the device that the sharded ones are on."""
        if isinstance(self._skeleton, Exception):
            raise CaptureError(
                f"The model cannot be captured again for new inputs: it cannot be copied ({self._skeleton}).",
                fix="Call it with the shapes and in the mode it was sharded for.",
            ) from self._skeleton
        model = copy.deepcopy(self._skeleton)
        made: dict[int, Tensor] = {}
        for module_name, module in model.named_modules():
            for table in tensor_tables(module):
                for name, empty in table.items():
                    if empty is None:
                        continue
                    if id(empty) not in made:
                        like = stored[f"{module_name}.{name}".lstrip(".")]
                        made[id(empty)] = _fake(fake, empty, like)
                    table[name] = made[id(empty)]
        return model


def _fake(fake: FakeTensorMode, empty: Tensor, like: Tensor) -> Tensor:
    with fake:
        made = torch.empty_strided(
            empty.shape, empty.stride(), dtype=like.dtype, device=like.device
        )
    if isinstance(empty, nn.Parameter):
        return nn.Parameter(made, requires_grad=like.requires_grad)
    return made


def _options(plan: Plan, options: Options | None) -> Options:
    """The options of the first plan, with its weights pinned."""
    if options is None:
        try:
            hardware = load_hardware(plan.hardware)
        except OptionsError:  # a profile that only the planning machine knows
            hardware = load_hardware("h100-sxm")
        options = Options(plan.mesh, hardware, plan.mode, plan.search)
    stored = tuple(
        (glob.escape(fqn), _pin(w.placements[0])) for w in plan.weights for fqn in w.fqns
    )
    return replace(options, constraints=stored, memory_budget_bytes=None, uniform=plan.uniform)


def _pin(placement: object) -> str:
    if isinstance(placement, Shard):
        return f"shard({placement.dim},{placement.blocks})"
    return "replicated"


def _skeleton(model: nn.Module) -> nn.Module | Exception:
    """A copy of the model whose tensors are on the meta device, with ties; or why there is none."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in memo:
            empty = torch.empty_like(tensor, device="meta", requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = empty
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # noqa: BLE001 - whatever a user's __deepcopy__ raises
        return error
