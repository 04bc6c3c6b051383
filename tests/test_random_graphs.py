"""Random programs under random placements; `python tests/random_graphs.py` runs as many as one likes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest import mock

import pytest
import random_graphs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import assert_sound
from random_graphs import Tally
from random_programs import Leaf, Program

from autoshard import plan
from autoshard.rules import DEFAULT
from autoshard.rules.rule import Call, Names, Rule
from autoshard.runtime import conversions


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What torch warns of in random programs is no concern of theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _settings(examples: int) -> settings:
    """No shrinking of the seed: `random_graphs` shrinks the program."""
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=examples,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=checks,
    )


def _assert_sound(seed: int, placements: int) -> None:
    tally = Tally()
    random_graphs.run(seed, placements, tally)
    for fault in tally.faults:
        pytest.fail(str(random_graphs.shrunk(fault)))


@_settings(60)
@given(seed=st.integers(0, 2**31))
def test_random_programs_are_sound(seed: int) -> None:
    _assert_sound(seed, 4)


@pytest.mark.slow
@_settings(300)
@given(seed=st.integers(2**31, 2**32))
def test_more_random_programs_are_sound(seed: int) -> None:
    _assert_sound(seed, 6)


# --- that it finds faults ---------------------------------------------------------------------------


def _splits_along(call: Call) -> Rule:
    """A wrong rule: every dimension is independent."""
    names = Names()
    x = names.fresh_dims(call.shape(0))
    return Rule(names.items, (x,), (x,) * len(call.results), family="reduction")


def _linear_in_one(call: Call) -> Rule | None:
    """A wrong rule: a tensor may be added to a share, once on every rank."""
    rule = _ADD(call)
    return rule and replace(rule, linear=(frozenset({0}),))


_ADD = DEFAULT._functions["aten.add.Tensor"]
_RULES: dict[str, Callable[[Call], Rule | None]] = {
    "aten.cumsum.default": _splits_along,
    "aten.softmax.int": _splits_along,
    "aten.add.Tensor": _linear_in_one,
}


def _rule(name: str) -> AbstractContextManager:
    return mock.patch.dict(DEFAULT._functions, {name: _RULES[name]})


def _move(name: str) -> AbstractContextManager:
    """A conversion that communicates nothing."""
    backward = conversions._MOVES[name][1]
    return mock.patch.dict(conversions._MOVES, {name: (conversions._same, backward)})


@pytest.mark.parametrize(
    "broken",
    [
        *(lambda name=name: _rule(name) for name in _RULES),
        lambda: _move("partial_to_invariant"),
        lambda: _move("invariant_to_partial"),
    ],
    ids=[*_RULES, "shares are not summed", "gradients are not divided"],
)
def test_a_broken_rule_or_conversion_is_found(
    broken: Callable[[], AbstractContextManager],
) -> None:
    tally, seed = Tally(), 50_000
    with broken():
        while not tally.faults and tally.graphs < 300:
            random_graphs.run(seed, 6, tally)
            seed += 1
    assert tally.faults


# --- operators without rules ------------------------------------------------------------------------

UNKNOWN = {
    "functional": ("v1 = torch.ops.random_graphs.mix(v0,b0)", "random_graphs.mix.default"),
    "two results": ("v1 = torch.ops.random_graphs.halves(v0)[0]", "random_graphs.halves.default"),
    "writing": ("torch.ops.random_graphs.ramp_(v0)", "random_graphs.ramp_.default"),
    "writing a buffer": (
        "torch.ops.random_graphs.record(b0,v0.detach())",
        "random_graphs.record.default",
    ),
    "viewing": ("v1 = torch.ops.random_graphs.turned(v0)", "random_graphs.turned.default"),
    "random": ("v1 = torch.ops.random_graphs.noise(v0)*v0", "random_graphs.noise.default"),
}


def _program(line: str) -> Program:
    """A column and a row product with an operator between them that nobody knows."""
    leaves = (
        Leaf("x0", "input", (6, 12)),
        Leaf("w0", "parameter", (12, 12)),
        Leaf("w1", "parameter", (12, 12)),
        Leaf("b0", "buffer", (12,)),
    )
    end = "v1" if " = " in line else "v0"
    lines = f"""
        v0 = F.linear(x0,w0)
        {line}
        v2 = {end} if {end}.shape[-1]==12 else {end}.t()
        v3 = F.linear(v2,w1)
    """
    return Program.of(leaves, lines, "v3")


@pytest.mark.parametrize("search", ["tensor", "all"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_operator_is_sound_and_named(name: str, search: str) -> None:
    line, target = UNKNOWN[name]
    program = _program(line)
    options = {"hardware": "ideal", "search": search}
    found = plan(program.module(), 2, program.arguments(), **options)
    assert target in {fallback.op for fallback in found.fallbacks}
    if name != "random":  # there the oracle's two models would draw one after the other
        assert_sound(program.module(), program.arguments(), search=search)
    assert random_graphs.assert_placements_sound(program).splitting
