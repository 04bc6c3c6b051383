"""Operator rules: what the dimensions of each operator mean.

Importing this package loads every built-in table. `register` teaches a new operator.
"""

from autoshard.rules import attention, contraction, indexing, loss, norm, pointwise, reduction, view
from autoshard.rules.registry import DEFAULT, register
from autoshard.rules.rule import Call, Dim, Rule, Special

__all__ = ["DEFAULT", "Call", "Dim", "Rule", "Special", "register"]

_TABLES = (attention, contraction, indexing, loss, norm, pointwise, reduction, view)
