"""Help that some libraries need to be captured as they run in eager.

What changes a model's meaning (layer drop, the key/value cache) is noted, so that the plan can say so.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from autoshard.compat import attributes_watched, no_inference_mode, transformers_export_patches
from autoshard.errors import CaptureError


@contextmanager
def capturing(model: torch.nn.Module, kwargs: dict[str, Any], notes: list[str]) -> Iterator[None]:
    """Keep known libraries on their eager branches inside the block.

    Args:
        model: what is captured.
        kwargs: what it is called with.
        notes: sentences on what is left out are added to it.
    """
    with ExitStack() as stack:
        stack.enter_context(no_inference_mode())
        stack.enter_context(mock.patch.object(torch.Tensor, "register_hook", _refuse_hook))
        stack.enter_context(mock.patch.object(torch.Tensor, "backward", _refuse_gradients))
        stack.enter_context(mock.patch.object(torch.autograd, "grad", _refuse_gradients))
        masking = sys.modules.get("transformers.masking_utils")
        if masking is not None:
            for patch in _transformers_masks(masking, kwargs):
                stack.enter_context(patch)
        if "use_cache" not in kwargs and "past_key_values" not in kwargs:
            stack.enter_context(_without_cache(model, notes))
        if model.training:
            stack.enter_context(_without_layer_drop(model, notes))
        stack.enter_context(_watched_random(notes))
        stack.enter_context(_kept_attributes(model, notes))
        yield


_FLAGS = ("is_torchdynamo_exporting", "is_torchdynamo_compiling", "is_tracing")
_UNTRACED = ("transformers.integrations.moe",)
"""Where the eager way takes operators that tensors without data cannot run."""


@contextmanager
def as_in_eager(model: torch.nn.Module) -> Iterator[None]:
    """transformers asks in many places whether it is exported, and then computes in another way."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and name not in _UNTRACED:
                for flag in _FLAGS:
                    if flag in vars(module):
                        stack.enter_context(mock.patch.object(module, flag, return_value=False))
        yield


@contextmanager
def helped(model: torch.nn.Module) -> Iterator[None]:
    """For a model that cannot be captured as it is: what transformers itself changes to export it."""
    with ExitStack() as stack:
        if "transformers" in sys.modules:
            for patch in transformers_export_patches(model):
                stack.enter_context(patch)
        yield


def _transformers_masks(masking: Any, kwargs: dict[str, Any]) -> list[Any]:
    """While exporting, transformers builds causal masks as tensors where eager says `is_causal`.

    The eager branch is right for the shapes that are captured. Whether sequences are packed is read
    from `position_ids`: those that the model counts itself are never packed.
    """
    patches = []
    if hasattr(masking, "is_torchdynamo_exporting"):
        patches.append(mock.patch.object(masking, "is_torchdynamo_exporting", return_value=False))
    if kwargs.get("position_ids") is None and hasattr(masking, "find_packed_sequence_indices"):
        patches.append(
            mock.patch.object(masking, "find_packed_sequence_indices", return_value=None)
        )
    if hasattr(masking, "_vmap_expansion_sdpa"):
        patches.append(mock.patch.object(masking, "_vmap_expansion_sdpa", _broadcast_mask))
    return patches


def _broadcast_mask(mask_function: Any) -> Any:
    """A mask of (batch, head, query, key) indices, on indices that broadcast: traced vmap cannot be kept."""

    def mask(*indices: torch.Tensor) -> torch.Tensor:
        shape = [len(index) for index in indices]
        views = [
            index.view([-1 if at == axis else 1 for at in range(len(shape))])
            for axis, index in enumerate(indices)
        ]
        found = mask_function(*views)
        if found.dim() != len(shape):
            raise CaptureError("The model's attention mask is made by vmap, of more than indices.")
        return found.expand(shape)

    return mask


def _refuse_hook(tensor: torch.Tensor, hook: Any) -> Any:
    raise CaptureError(
        "A hook is registered on a tensor inside of forward, which would not run.",
        fix="Write what it does as an autograd.Function, which is kept.",
    )


def _refuse_gradients(*args: Any, **kwargs: Any) -> Any:
    raise CaptureError(
        "Gradients are computed inside of forward.",
        fix="Give back what is needed for them, and compute them outside of the model.",
    )


@contextmanager
def _attributes(owners: list[Any], names: tuple[str, ...], on: Any, off: Any) -> Iterator[bool]:
    """Attributes of these names that satisfy `on` are `off` in the block; whether there are any."""
    before = [
        (owner, name, value)
        for owner in owners
        for name in names
        if on(value := vars(owner).get(name))
    ]
    for owner, name, _ in before:
        setattr(owner, name, off)
    try:
        yield bool(before)
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _configs(model: torch.nn.Module) -> list[Any]:
    """The configurations that the model's modules hold, each once."""
    found = {}
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "__dict__"):
            found[id(config)] = config
    return list(found.values())


@contextmanager
def _without_cache(model: torch.nn.Module, notes: list[str]) -> Iterator[None]:
    """Key/value caches among the outputs would have to be gathered in every layer."""
    with _attributes(_configs(model), ("use_cache",), lambda v: v is True, False) as found:
        if found:
            notes.append(
                "The model's key/value cache is left out of its outputs; pass use_cache=True to keep it."
            )
        yield


@contextmanager
def _without_layer_drop(model: torch.nn.Module, notes: list[str]) -> Iterator[None]:
    """Whether a layer is dropped is drawn in Python for each call; a program runs every layer."""
    names = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    owners = [*model.modules(), *_configs(model)]
    with _attributes(owners, names, lambda v: isinstance(v, float) and v > 0, 0.0) as found:
        if found:
            notes.append("Layer drop is off: the sharded model runs every layer in every step.")
        yield


@contextmanager
def _watched_random(notes: list[str]) -> Iterator[None]:
    """Note where the model draws random numbers outside of torch: the program repeats the first."""
    numpy = sys.modules.get("numpy")
    before = random.getstate()
    drawn = numpy.random.get_state() if numpy else None
    yield
    changed = random.getstate() != before
    if numpy and drawn is not None:
        now = numpy.random.get_state()
        changed = changed or now[2] != drawn[2] or bool((now[1] != drawn[1]).any())
    if changed:
        notes.append(
            "The model draws random numbers from Python or NumPy: the sharded model repeats the first."
        )


@contextmanager
def _kept_attributes(model: torch.nn.Module, notes: list[str]) -> Iterator[None]:
    """Give modules back the attributes that forward changes; note those that may lead it elsewhere."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    contents = [
        (c, copy.copy(c)) for _, kept in before for c in kept.values() if type(c) in (dict, list)
    ]
    changed: dict[str, None] = {}
    try:
        with attributes_watched(lambda module, name: changed.setdefault(name)):
            yield
    finally:
        for module, kept in before:
            vars(module).clear()
            vars(module).update(kept)
        for container, kept in contents:
            container.clear()
            container.update(kept) if isinstance(container, dict) else container.extend(kept)
        if changed:
            notes.append(
                f"Forward changes {', '.join(list(changed)[:3])} of the model's attributes: "
                "the sharded model runs as its first call does."
            )
