"""Models as users write them, in plain torch: a register of builders, each of `(model, args, kwargs)`.

The models are in `architectures_*`; `test_architectures` holds every one to the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
CASES: dict[str, Callable[[], Built]] = {}


def case(build: Callable[..., Any]) -> Callable[..., Any]:
    """Register a builder by its name. It gives `(model, *args)`; a dict at the end is the kwargs."""

    def built() -> Built:
        model, *args = build()
        kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
        return model, tuple(args), kwargs

    CASES[build.__name__] = built
    return build
