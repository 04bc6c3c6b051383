"""Capture a module through `torch.export`."""

from __future__ import annotations

import inspect
import os.path
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.capture.canonical import canonicalize
from autoshard.capture.captured import Captured
from autoshard.capture.convert import convert
from autoshard.capture.shims import LostBackward, capturing
from autoshard.compat import quiet_export, tree_map
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
    given = dict(kwargs or {})
    device = _device(model)
    examples = tree_map(lambda x: _example(x, device), (tuple(args), given))
    try:
        with capturing(given), quiet_export():
            program = torch.export.export(model, examples[0], examples[1], strict=False)
    except LostBackward as error:
        raise _lost(model, error) from error
    except Exception as error:
        raise _explain(model, error) from error
    canonicalize(program.graph_module)
    return convert(program, model)


def _device(model: torch.nn.Module) -> torch.device | None:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return None


def _example(value: Any, device: torch.device | None) -> Any:
    """A copy of its own, so that one object passed twice is two inputs; on the model's device."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone()
    if device is not None and device.type == "meta":
        copy = copy.to(device)
    return copy.requires_grad_(value.requires_grad)


_WHY = (
    (
        (
            "data-dependent",
            "GuardOnDataDependent",
            "unbacked",
            "Could not guard",
            "Eq(u",
            "bool(fake)",
        ),
        "the program's path or shapes depend on the values of tensors",
        "Make the branch or shape depend on Python numbers, or use torch.where / torch.cond.",
    ),
    (
        ("missing", "required positional argument", "required keyword-only"),
        "an input is missing",
        "Pass example inputs: args=(…), kwargs={…}.",
    ),
    (
        ("data_ptr", "numpy", "FakeTensor", "fake mode"),
        "it leaves torch (numpy, data_ptr) or mixes real tensors in",
        "Keep the computation in torch, on the tensors that the model owns.",
    ),
)


def _explain(model: torch.nn.Module, error: Exception) -> CaptureError:
    text = f"{type(error).__name__}: {error}"
    why, fix = (
        "torch.export could not trace it",
        "Change the line so that torch.export can trace it.",
    )
    for words, reason, advice in _WHY:
        if any(word in text for word in words):
            why, fix = reason, advice
            break
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CaptureError(
        f"{type(model).__name__} cannot be captured: {why} ({first[:300]}).", _user_line(error), fix
    )


def _lost(model: torch.nn.Module, error: LostBackward) -> CaptureError:
    return CaptureError(
        f"{type(model).__name__} cannot be captured: the backward of {error.function}, an "
        "autograd.Function, would be lost.",
        _user_line(error),
        "Write it with operators of torch, or make it one: torch.library.custom_op and register_autograd.",
    )


def _user_line(error: BaseException) -> str:
    """The innermost line of the traceback that is neither Python's, nor torch's, nor ours."""
    ours, torchs = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__)
    skip = (ours, torchs, os.path.dirname(inspect.__file__) + os.sep)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*skip, "<"))
    ]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}: {last.line}"
