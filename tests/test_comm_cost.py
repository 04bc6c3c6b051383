"""Prices of collectives: values against measurements, units, and what must order as it does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import sympy
from sympy.physics.units import Quantity, byte, second

from autoshard.cost.comm import algorithm, algorithms, collective_s, copy_s, formulas
from autoshard.cost.compute import roofline_formula
from autoshard.cost.hardware import KINDS, TOPOLOGIES, Link, hardware_names, load_hardware
from autoshard.errors import OptionsError

MIB = 2**20
H100 = load_hardware("h100-sxm").intra
A100 = load_hardware("a100-sxm").intra
LINK = Link("test", latency_s=1e-6, bandwidth_bytes_s=1e9, launch_s=1e-5)
FORMULAS = [(kind, name) for kind in KINDS for name in formulas(kind)]


def one(kind: str, name: str, full_bytes: float, ranks: int, link: Link) -> float:
    """The formula of one algorithm, substituted by sympy: what `collective_s` must agree with."""
    values = {
        "n": sympy.Integer(ranks),
        "bytes": full_bytes,
        "alpha": link.latency_s,
        "beta": 1 / link.bandwidth(kind),
        "launch": link.launch_s,
        "eta": link.in_switch_efficiency,
    }
    expression = formulas(kind)[name][0]
    return float(expression.subs({s: values[str(s)] for s in expression.free_symbols}))


# --------------------------------------------------------------------------------------- values


def test_h100_is_about_as_measured():
    """NVIDIA/nccl-tests issue 212: 370 GB/s on the wire, 275 GB/s of message with NVLink SHARP."""
    assert 0.23e-3 <= collective_s("all_reduce", 64 * MIB, 8, H100) <= 0.26e-3
    assert algorithm("all_reduce", 64 * MIB, 8, H100) == "in_switch"
    for kind in ("all_gather", "reduce_scatter"):
        assert 0.16e-3 <= collective_s(kind, 64 * MIB, 8, H100) <= 0.18e-3
    assert 15e-6 <= collective_s("all_reduce", 32 * 1024, 8, H100) <= 25e-6
    large = 16 * 2**30
    assert large / collective_s("all_reduce", large, 8, H100) == pytest.approx(275e9, rel=0.03)


def test_b200_is_about_as_measured():
    """NVIDIA/nccl issue 1807: a bus bandwidth of 830 GB/s for 8 GPUs."""
    large = 16 * 2**30
    seconds = collective_s("all_reduce", large, 8, load_hardware("b200").intra)
    assert large / seconds * 2 * 7 / 8 == pytest.approx(830e9, rel=0.03)


def test_values_by_hand():
    # launch + steps·α + bytes·β with n = 4, 4 MB, 1 GB/s, 1 µs, 10 µs
    size = 4e6
    assert collective_s("all_reduce", size, 4, LINK) == pytest.approx(1e-5 + 6e-6 + 6e-3)
    assert collective_s("all_gather", size, 4, LINK) == pytest.approx(1e-5 + 3e-6 + 3e-3)
    assert collective_s("reduce_scatter", size, 4, LINK) == pytest.approx(1e-5 + 3e-6 + 3e-3)
    assert collective_s("all_to_all", size, 4, LINK) == pytest.approx(1e-5 + 3e-6 + 0.75e-3)
    assert collective_s("all_reduce", 0, 4, LINK) == pytest.approx(1e-5 + 4e-6), "tree: 2·2 steps"
    ring = replace(LINK, topology="ring")
    assert collective_s("all_to_all", size, 4, ring) == pytest.approx(1e-5 + 2e-6 + 1e-3)
    switch = replace(LINK, in_switch_reduction=True, in_switch_efficiency=1.0)
    assert collective_s("all_reduce", size, 4, switch) == pytest.approx(1e-5 + 4e-6 + 5e-3)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 64, 2**29])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_formulas_are_the_printed_ones(kind: str, topology: str, ranks: int):
    """At 2**29 ranks, log(n)/log(2) in floats is above 29: ⌈log₂ n⌉ would be 30."""
    link = replace(H100, topology=topology, in_switch_reduction=topology == "switch")
    for size in (1e3, 1e8):
        expected = min(one(kind, name, size, ranks, link) for name in algorithms(kind, link))
        assert collective_s(kind, size, ranks, link) == pytest.approx(expected, rel=1e-12)


def test_a_group_across_nodes_costs_more():
    h100 = load_hardware("h100-sxm")
    inside, across = h100.link(8, 1), h100.link(8, 8)
    for kind in KINDS:
        assert collective_s(kind, 64 * MIB, 8, across) > 4 * collective_s(kind, 64 * MIB, 8, inside)


# ---------------------------------------------------------------------------------------- units


@pytest.mark.parametrize(("kind", "name"), FORMULAS)
def test_every_formula_is_in_seconds(kind: str, name: str):
    expression, source = formulas(kind)[name]
    units = {"bytes": byte, "alpha": second, "beta": second / byte, "launch": second}
    assert {str(s) for s in expression.free_symbols} <= {*units, "n", "eta"}
    assert_seconds(expression, {**units, "n": sympy.Integer(8), "eta": sympy.Rational(1, 2)})
    assert len(source) > 40


def test_the_roofline_is_in_seconds():
    flop = Quantity("flop")
    units = {"flops": flop, "bytes": byte, "peak": flop / second, "bandwidth": byte / second}
    expression, _ = roofline_formula()
    for branch in expression.args:  # Max compares quantities of one kind: check each of them.
        assert_seconds(branch, {**units, "launch": second})


def test_a_formula_in_other_units_is_found():
    alpha, size = sympy.symbols("alpha bytes", positive=True)
    with pytest.raises(AssertionError):
        assert_seconds(alpha + size, {"alpha": second, "bytes": byte})


def assert_seconds(expression: sympy.Expr, units: dict[str, sympy.Expr]) -> None:
    """With every symbol replaced by its unit, the expression is a number of seconds."""
    substituted = expression.subs({s: units[str(s)] for s in expression.free_symbols})
    assert sympy.simplify(substituted / second).is_number
    assert not (sympy.simplify(substituted / second)).atoms(Quantity)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clock_twice_as_slow_doubles_every_time(kind: str):
    slow = replace(
        H100,
        latency_s=2 * H100.latency_s,
        launch_s=2 * H100.launch_s,
        bandwidth_bytes_s=H100.bandwidth_bytes_s / 2,
    )
    for size in (1e3, 1e6, 1e9):
        twice = 2 * collective_s(kind, size, 8, H100)
        assert collective_s(kind, size, 8, slow) == pytest.approx(twice)
        bigger = replace(H100, bandwidth_bytes_s=H100.bandwidth_bytes_s * 1024)
        assert collective_s(kind, size * 1024, 8, bigger) == pytest.approx(twice / 2)


# --------------------------------------------------------------------------------- known traps


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_communicates_nothing(kind: str):
    for name in hardware_names():
        assert collective_s(kind, 1e9, 1, load_hardware(name).link(1, 1)) == 0.0
    assert algorithm(kind, 1e9, 1, H100) == "none"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", hardware_names())
def test_more_bytes_never_take_less_time(kind: str, name: str):
    for ranks, stride in ((2, 1), (8, 1), (16, 1), (2, 8)):
        link = load_hardware(name).link(ranks, stride)
        times = [collective_s(kind, 2.0**e, ranks, link) for e in range(36)]
        assert all(b >= a for a, b in pairwise(times))
        assert times[-1] > times[0] or name == "ideal"


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_more_ranks_never_take_less_time(kind: str, topology: str):
    """Without in-switch reduction, whose 1/n of traffic a rank falls with n; see docs/costs.md."""
    link = replace(A100, topology=topology)
    for size in (1.0, 1e5, 1e7, 1e10):
        times = [collective_s(kind, size, ranks, link) for ranks in range(1, 65)]
        assert all(b >= a for a, b in pairwise(times))


def test_all_to_all_of_one_tensor_gets_cheaper_with_ranks():
    """Each holds 1/n of the tensor: bytes a rank fall, as they must when a batch is split."""
    times = [collective_s("all_to_all", 1e9, ranks, A100) for ranks in (2, 4, 8, 16)]
    assert all(b < a for a, b in pairwise(times))


def test_all_to_all_is_not_priced_as_all_gather():
    assert collective_s("all_to_all", 1e9, 8, A100) < collective_s("all_gather", 1e9, 8, A100) / 4


@pytest.mark.parametrize("link", [H100, A100, LINK], ids=lambda link: link.name)
def test_an_all_reduce_costs_at_least_a_reduce_scatter_and_at_most_both_halves(link: Link):
    for size in (1e5, 1e7, 1e9):
        for ranks in (2, 4, 8):
            whole = collective_s("all_reduce", size, ranks, link)
            halves = [collective_s(k, size, ranks, link) for k in ("reduce_scatter", "all_gather")]
            assert max(halves) < whole <= sum(halves)


def test_tree_wins_small_and_ring_wins_large():
    assert algorithm("all_reduce", 1024, 8, A100) == "tree"
    assert algorithm("all_reduce", 1e9, 8, A100) == "ring"
    for kind in ("all_gather", "reduce_scatter"):
        assert algorithm(kind, 1024, 8, A100) == "recursive"
        assert algorithm(kind, 1e9, 8, A100) == "ring"


def test_in_switch_reduction_pays_for_many_ranks_only():
    assert algorithm("all_reduce", 1e9, 2, H100) == "ring"
    assert algorithm("all_reduce", 1e9, 8, H100) == "in_switch"
    assert "in_switch" not in algorithms("all_reduce", A100)
    assert algorithms("all_reduce", replace(H100, topology="ring")) == ("ring",)


@pytest.mark.parametrize("kind", KINDS)
def test_ideal_is_free(kind: str):
    ideal = load_hardware("ideal")
    for ranks, stride in ((2, 1), (8, 1), (4096, 1), (2, 4096)):
        assert collective_s(kind, 1e12, ranks, ideal.link(ranks, stride)) == 0.0
    assert copy_s(1e12, ideal) == 0.0


def test_a_kind_with_its_own_rate_is_priced_by_it():
    link = replace(LINK, kind_bandwidths_bytes_s=(("all_gather", 0.5e9),))
    assert collective_s("all_gather", 1e9, 2, link) == pytest.approx(1.0, rel=1e-3)
    assert collective_s("reduce_scatter", 1e9, 2, link) == pytest.approx(0.5, rel=1e-3)


def test_a_copy_reads_and_writes():
    h100 = load_hardware("h100-sxm")
    rate = h100.memory_bandwidth_bytes_s * h100.memory_efficiency
    assert copy_s(1e9, h100) == pytest.approx(2e9 / rate)
    assert copy_s(1, h100) == h100.launch_s
    assert copy_s(0, h100) == 0.0
    assert copy_s(1e9, replace(h100, copy_bandwidth_bytes_s=1e9)) == pytest.approx(2.0)


# --------------------------------------------------------------------------------------- errors


def test_an_unknown_collective():
    with pytest.raises(OptionsError) as error:
        collective_s("allreduce", 1.0, 2, LINK)
    assert str(error.value) == (
        "There is no collective 'allreduce'.\n"
        "  fix:   Did you mean 'all_reduce'? "
        "The kinds are all_reduce, all_gather, reduce_scatter, all_to_all."
    )
    with pytest.raises(OptionsError, match="There is no collective 'broadcast'"):
        formulas("broadcast")


@pytest.mark.parametrize(("size", "ranks"), [(-1.0, 2), (1.0, 0), (float("nan"), 2)])
def test_sizes_that_cannot_be(size: float, ranks: int):
    with pytest.raises(OptionsError, match="cannot be priced"):
        collective_s("all_reduce", size, ranks, LINK)


def test_importing_costs_imports_neither_torch_nor_sympy():
    code = (
        "import sys; import autoshard.cost.comm, autoshard.cost.compute; "
        "from autoshard.cost.hardware import load_hardware; load_hardware('h100-sxm'); "
        "print([m for m in ('torch', 'sympy', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
