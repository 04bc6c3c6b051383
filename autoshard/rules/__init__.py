"""Operator rules: what the dimensions of each operator mean.

Importing this package loads every built-in table. `register` teaches a new operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.rules import (
    attention,
    contraction,
    indexing,
    loss,
    norm,
    pointwise,
    reduction,
    space,
    view,
)
from autoshard.rules.registry import DEFAULT, register
from autoshard.rules.rule import Call, Dim, Rule, Special

__all__ = ["DEFAULT", "Call", "Dim", "Rule", "Special", "discover", "register"]

_TABLES = (attention, contraction, indexing, loss, norm, pointwise, reduction, space, view)


def discover(op: Any, example: Sequence[Any]) -> str:
    """Find an operator's rule by running it, and print it as a line to paste; see `rules.discovery`.

    Args:
        op: an operator of `torch.ops`, or its name, "namespace::name".
        example: positional arguments, tensors first; best with sizes of their own, of 3 or more.

    Raises:
        RuleError: the operator cannot be run so, or no rule could cover it.
    """
    from autoshard.rules.discovery import discover

    return discover(op, example)
