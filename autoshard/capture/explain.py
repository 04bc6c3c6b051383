"""Say why a model cannot be captured: at which of the user's lines, and what to change."""

from __future__ import annotations

import inspect
import os.path
import traceback

import torch

from autoshard.errors import CaptureError

_PYTHON = os.path.dirname(inspect.__file__)
_LAYERS = os.path.join(os.path.dirname(torch.nn.__file__), "modules", "")
_TORCH, _OURS = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))

_WHY = (
    (
        (
            "data-dependent",
            "DataDependent",
            "unbacked",
            "Eq(u",
            "aten._local_scalar_dense",
            "aten.nonzero",
            "DynamicOutputShape",
        ),
        "its path or the shapes of its tensors depend on the values of tensors",
        "Let the branch or shape depend on Python numbers, or compute both sides and use torch.where.",
    ),
    (
        ("data_ptr", ".numpy()", "numpy array", "FakeTensor", "fake mode", "fake tensor in"),
        "it leaves torch (numpy, data_ptr), or mixes in tensors that are not the model's",
        "Keep the computation in torch, on tensors that the model owns or is given.",
    ),
)
_MISSING = ("missing a required argument", "required positional argument", "required keyword-only")


def explain(model: torch.nn.Module, error: Exception) -> CaptureError:
    """The error to show for what `torch.export`, or the model itself, raised."""
    name, where = type(model).__name__, user_line(error)
    if isinstance(error, CaptureError):
        return CaptureError(error.what, error.where or where, error.fix)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TypeError) and any(words in text for words in _MISSING):
        return CaptureError(
            f"{name} is called without an input that it needs ({_first_line(error)}).",
            where,
            "Pass example inputs: args=(…), kwargs={…}.",
        )
    for words, reason, advice in _WHY:
        if any(word in text for word in words):
            return CaptureError(f"{name} cannot be captured: {reason}.", where, advice)
    kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
    return CaptureError(
        f"{name} cannot be captured: it raises {kind}{_first_line(error)}",
        where,
        "Check that the model runs on these inputs; if it does, torch.export cannot trace this line.",
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def user_line(error: BaseException) -> str:
    """The innermost line of the traceback that is neither Python's, nor torch's, nor ours.

    Where there is none, for the model has torch's own layers alone: the innermost in one of those.
    """
    frames = traceback.extract_tb(error.__traceback__)
    users = [
        frame
        for frame in frames
        if not frame.filename.startswith((_TORCH, _OURS, "<")) and not _is_pythons(frame.filename)
    ]
    frames = users or [frame for frame in frames if frame.filename.startswith(_LAYERS)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}: {last.line}"


def _is_pythons(path: str) -> bool:
    return path.startswith(_PYTHON) and "site-packages" not in path
