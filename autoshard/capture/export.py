"""Capture a module through `torch.export`."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from autoshard.capture.canonical import canonicalize
from autoshard.capture.captured import Captured
from autoshard.capture.convert import convert, trained
from autoshard.capture.dynamic import enclose
from autoshard.capture.explain import explain
from autoshard.capture.functions import kept_functions
from autoshard.capture.shims import as_in_eager, capturing, helped
from autoshard.compat import (
    code_when_called,
    has_backward_hooks,
    marked_grad_mode,
    quiet_export,
    tree_map,
)
from autoshard.errors import CaptureError


def capture(
    model: torch.nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Captured:
    """Capture `model` as it runs on these example inputs. Nothing of the model is changed.

    Args:
        model: on any device, `meta` included.
        args, kwargs: example inputs; only their shapes, dtypes and `requires_grad` matter.

    Raises:
        CaptureError: the model cannot be captured; says at which of the user's lines, and why.
    """
    _check_hooks(model)
    given = dict(kwargs or {})
    device = _device(model)
    examples = tree_map(lambda x: _example(x, device), (tuple(args), given))
    with _paused_collector():
        program, notes = _export(model, *examples)
        canonicalize(program.graph_module, trained(program))
        if _has_help(model):
            enclose(program.graph_module)
        return replace(convert(program, model), notes=tuple(notes))


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Tracing makes a great many objects that all live on: looking for garbage is an eighth of its time."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def _export(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.export.ExportedProgram, list[str]]:
    """Export the model as it runs in eager, or else as its library has it exported; with notes."""
    failed: Exception | None = None
    for help_ in (as_in_eager, nullcontext, helped) if _has_help(model) else (nullcontext,):
        notes: list[str] = []
        try:
            with _tracing(), capturing(model, kwargs, notes), help_(model):
                return torch.export.export(model, args, kwargs, strict=False), notes
        except CaptureError as error:
            raise explain(model, error) from error
        except Exception as error:  # noqa: BLE001 - whatever the model or torch raises is explained
            failed = failed or error
    assert failed is not None
    raise explain(model, failed) from failed


@contextmanager
def _tracing() -> Iterator[None]:
    """What holds while any model is traced, whatever the mode of the caller."""
    plain = torch.inference_mode(False), torch.enable_grad()
    with (
        plain[0],
        plain[1],
        kept_functions(),
        marked_grad_mode(),
        code_when_called(),
        quiet_export(),
    ):
        yield


def _has_help(model: torch.nn.Module) -> bool:
    return any(t.__module__.startswith("transformers.") for t in type(model).__mro__)


def _check_hooks(model: torch.nn.Module) -> None:
    """Refuse backward hooks of modules: the sharded program has no such modules to run them at."""
    for name, module in model.named_modules():
        if has_backward_hooks(module):
            raise CaptureError(
                f"The module {name or type(module).__name__} has a backward hook, which would not run.",
                fix="Remove the hook, or put it on a parameter of the sharded model.",
            )


def _device(model: torch.nn.Module) -> torch.device | None:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return None


def _example(value: Any, device: torch.device | None) -> Any:
    """A copy of its own, so that one object passed twice is two inputs.

    It is on the meta device where the model is, and on the model's where it is on the meta device.
    """
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone()
    if device is not None and "meta" in (device.type, copy.device.type) and device != copy.device:
        copy = torch.empty_like(copy, device=device)
    return copy.requires_grad_(value.requires_grad)
