"""Every rule × every strategy, executed on slices and held to the unsharded operator."""

from __future__ import annotations

import pytest
from rules_cases import TABLE
from rules_harness import Case, check

from autoshard.rules import DEFAULT


def _name(found: Case) -> str:
    return found.target.removeprefix("aten.").removesuffix(".default")


@pytest.mark.parametrize("found", TABLE, ids=_name)
def test_every_strategy_computes_what_the_operator_computes(found: Case) -> None:
    assert check(found) > 0


def test_a_rule_without_a_case_does_not_exist() -> None:
    executed = {found.target for found in TABLE}
    assert sorted(set(DEFAULT.names()) - executed) == []
