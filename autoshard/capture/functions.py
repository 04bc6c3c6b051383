"""Custom `autograd.Function`s, whose backward `torch.export` would silently drop.

While a model is captured, each call of one becomes a call of an operator of its own, which runs the
function forward, and for its backward runs it again with gradients. No rule knows the operator, so it
runs whole on every rank, and is named among the plan's fallbacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from autoshard.capture.opaque import define
from autoshard.compat import (
    functions_applied_by,
    schema_name,
    serves_an_operator,
    tree_flatten,
    tree_unflatten,
    version,
)
from autoshard.errors import CaptureError

NAMESPACE = "autograd_function"
_known: dict[Any, Any] = {}


@contextmanager
def kept_functions() -> Iterator[None]:
    """A block in which custom Functions are traced as operators that keep their backward."""
    with functions_applied_by(_apply):
        yield


def _apply(function: Any, plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `function.apply(*args)` does while capturing.

    Args:
        function: the Function.
        plain: its own apply.
        args, kwargs: what it is called with.
    """
    if function is CheckpointFunction:  # it computes the same, twice
        run, _, *given = args
        return run(*given)
    flat, spec = tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, Tensor)]
    if serves_an_operator(function) or not torch.is_grad_enabled() or not tensors:
        return plain(*args, **kwargs)
    _check_nesting(function, args, kwargs)
    rest = tuple(None if isinstance(x, Tensor) else x for x in flat)
    at = tuple(i for i, x in enumerate(flat) if isinstance(x, Tensor))
    operator, site = _operator(_Site(function, plain, rest, at, spec))
    return tree_unflatten(list(operator(tensors)), site.nesting)


def _check_nesting(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A Function gives gradients to tensors that are arguments, not to those inside of lists."""
    nested = [x for x in (*args, *kwargs.values()) if not isinstance(x, Tensor)]
    inside = [x for x in tree_flatten(nested)[0] if isinstance(x, Tensor)]
    if any(x.requires_grad for x in inside):
        raise CaptureError(
            f"The autograd.Function {function.__name__} takes tensors inside of a list or dict.",
            fix="Pass them as arguments of their own.",
        )


class _Site:
    """A Function with all of its arguments that are no tensors."""

    def __init__(
        self, function: Any, plain: Any, rest: tuple, at: tuple[int, ...], spec: Any
    ) -> None:
        self.function = function
        self.random_state: Any = None
        self.nesting: Any = None
        self._plain, self._rest, self._at, self._spec = plain, rest, at, spec

    @property
    def key(self) -> Any:
        """Equal for calls that one operator serves; None where that cannot be told."""
        key = (self.function, self._rest, self._at, str(self._spec))
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def call(self, tensors: list[Tensor]) -> Any:
        """Call the Function."""
        flat = list(self._rest)
        for index, tensor in zip(self._at, tensors, strict=True):
            flat[index] = tensor
        args, kwargs = tree_unflatten(flat, self._spec)
        return self._plain(*args, **kwargs)

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Call the Function, for the tensors that it gives back, in memory of their own."""
        with torch.no_grad():
            return [x.clone() for x in tree_flatten(self.call([t.detach() for t in tensors]))[0]]

    def trace(self, tensors: list[Tensor]) -> list[Tensor]:
        """As `run`, on tensors without data; notes how the result is nested.

        Raises:
            CaptureError: the Function gives back what is no tensor, or writes to what it takes.
        """
        given = [t.detach() for t in tensors]
        versions = [version(t) for t in given]
        with torch.no_grad():
            results, self.nesting = tree_flatten(self.call(given))
        name = self.function.__name__
        if not all(isinstance(x, Tensor) for x in results):
            raise CaptureError(
                f"The autograd.Function {name} gives back what is no tensor.",
                fix="Let it give back tensors alone.",
            )
        if versions != [version(t) for t in given]:
            raise CaptureError(
                f"The autograd.Function {name} writes to what it is given.",
                fix="Let it give back a new tensor.",
            )
        return [x.clone() for x in results]


def _operator(site: _Site) -> tuple[Any, _Site]:
    """The operator that runs a Function, `autograd_function::Name`, and the site it was made for."""
    key = site.key
    if key is not None and key in _known:
        return _known[key]
    stem = re.sub(r"\W", "_", site.function.__name__)
    taken = {schema_name(op) for op, _ in _known.values()}
    name, number = stem, 1
    while f"{NAMESPACE}::{name}" in taken:
        number += 1
        name = f"{stem}_{number}"
    made = define(NAMESPACE, name, site), site
    _known[key if key is not None else name] = made
    return made
