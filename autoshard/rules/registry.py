"""The table of rules: operator name → a function from a call to its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autoshard.errors import RuleError
from autoshard.rules.rule import Call, Rule
from autoshard.rules.template import Template

RuleFn = Callable[[Call], "Rule | None"]


class Registry:
    """Rules by operator. A rule function gives None for a call that it does not cover."""

    def __init__(self) -> None:
        self._functions: dict[str, RuleFn] = {}

    def add(self, targets: str | Iterable[str], function: RuleFn) -> None:
        """Give the operators `targets` (names separated by spaces) one rule function."""
        names = targets.split() if isinstance(targets, str) else targets
        for name in names:
            self._functions[name] = function

    def computed(self, targets: str) -> Callable[[RuleFn], RuleFn]:
        """Decorator: the function below is the rule of these operators."""

        def keep(function: RuleFn) -> RuleFn:
            self.add(targets, function)
            return function

        return keep

    def template(self, targets: str, text: str, **options: object) -> None:
        """Give the operators a rule written as one line; options as `Template.parse` takes them."""
        self.add(targets, Template.parse(text, **options).bind)  # type: ignore[arg-type]

    def rule(self, call: Call) -> Rule | None:
        """The rule of this call, or None where the operator or this use of it has none."""
        function = self._functions.get(call.target)
        return function(call) if function else None

    def __contains__(self, target: str) -> bool:
        return target in self._functions

    def names(self) -> tuple[str, ...]:
        """The operators that have a rule, sorted."""
        return tuple(sorted(self._functions))


DEFAULT = Registry()
"""The built-in rules, and those that `register` added."""


def register(op: str, rule: str, *, linear: str = "") -> None:
    """Teach an operator: name the factors of its dimensions as an einsum does.

    `register("my::linear", "x[*b, i] w[o, i] -> y[*b, o]", linear="x|w")` says that `*b` and `o` may be
    split freely and that `i` is summed over. Write `·` (or `_`) for a dimension that must stay whole,
    and `b?` for one that may be absent or of size 1. Only a *summed* factor may be missing from the
    result: a factor that is reduced otherwise (a maximum, a norm) must be `·`.

    Args:
        op: the operator, "namespace::name" or "namespace::name.overload".
        rule: operands in the order of the operator's tensor arguments, `->`, results.
        linear: operands in which the operator is linear, so that it may take shares still to be
            summed: alternatives separated by `|`, operands jointly linear joined by `+`.

    Raises:
        RuleError: the rule cannot be read.
    """
    if "::" not in op:
        raise RuleError(f"'{op}' is not an operator's name.", fix="Write namespace::name.")
    namespace, name = op.split("::", 1)
    overload = "" if "." in name else ".default"
    DEFAULT.template(f"{namespace}.{name}{overload}", rule, linear=linear, family="contraction")
