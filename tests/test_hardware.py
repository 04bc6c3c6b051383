"""Hardware profiles: their numbers, the link a group crosses, and what a malformed file says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cost.compute import DTYPE_BYTES, itemsize, roofline_s
from autoshard.cost.hardware import (
    KINDS,
    Hardware,
    Link,
    hardware_from_dict,
    hardware_names,
    load_hardware,
)
from autoshard.errors import OptionsError

PROFILES = (
    "a100-sxm",
    "a100-sxm-40",
    "b200",
    "cpu-gloo",
    "h100-pcie",
    "h100-sxm",
    "h200-sxm",
    "ideal",
    "l40s-pcie",
    "mi300x",
    "tpu-v5p",
)


def toml(**changes: str) -> str:
    """A small profile as text; `changes` replaces lines by key, and drops those that are ""."""
    keys = {
        "name": '"mine"',
        "source": '"a test"',
        "matmul_efficiency": "0.5",
        "memory_bandwidth_bytes_s": "1e12",
        "memory_efficiency": "1.0",
        "memory_bytes": "1000000",
        "launch_s": "1e-6",
        "fused_pointwise": "true",
        "ranks_per_node": "8",
        "peak_flops": "{ float32 = 1e12, bfloat16 = 4e12 }",
        "intra": '{ name = "wire", latency_s = 1e-6, bandwidth_bytes_s = 1e11, launch_s = 1e-5 }',
        "inter": '{ name = "net", latency_s = 5e-6, bandwidth_bytes_s = 2e10, launch_s = 2e-5 }',
        **changes,
    }
    return "\n".join(f"{key} = {value}" for key, value in keys.items() if value)


@pytest.fixture
def mine(tmp_path: Path) -> Hardware:
    path = tmp_path / "mine.toml"
    path.write_text(toml())
    return load_hardware(path)


# ------------------------------------------------------------------------------------- profiles


def test_the_profiles_are_these():
    assert hardware_names() == PROFILES


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_loads_says_its_source_and_survives_a_round_trip(name: str):
    hardware = load_hardware(name)
    assert hardware.name == name
    assert len(hardware.source.split()) >= 10 or name == "ideal"
    assert set(dict(hardware.peak_flops)) <= set(DTYPE_BYTES)
    assert hardware_from_dict(json.loads(json.dumps(hardware.to_dict()))) == hardware
    assert load_hardware(hardware) is hardware
    assert load_hardware(name) is hardware
    hash(hardware)


def test_datasheet_numbers():
    h100, a100 = load_hardware("h100-sxm"), load_hardware("a100-sxm")
    assert h100.peak("bfloat16") == 989e12
    assert h100.peak("float32") == 67e12, "without TF32"
    assert h100.memory_bandwidth_bytes_s == 3.35e12
    assert h100.intra.bandwidth_bytes_s == pytest.approx(0.8 * 450e9, rel=0.05)
    assert h100.intra.in_switch_reduction
    assert a100.peak("bfloat16") == 312e12
    assert not a100.intra.in_switch_reduction
    assert load_hardware("a100-sxm-40").memory_bytes == a100.memory_bytes / 2
    assert not load_hardware("cpu-gloo").fused_pointwise


def test_a_dtype_that_is_not_listed_is_computed_as_another_one():
    h100, tpu = load_hardware("h100-sxm"), load_hardware("tpu-v5p")
    assert h100.peak("int64") == h100.peak("bool") == h100.peak("complex64") == 67e12
    assert h100.peak("float8_e4m3fn") == 1979e12
    assert h100.peak("float8_e4m3fnuz") == 989e12
    assert tpu.peak("float16") == tpu.peak("bfloat16")
    assert tpu.peak("complex128") == tpu.peak("float64")
    assert replace(tpu, peak_flops=(("bfloat16", 2.0), ("float32", 1.0))).peak("float64") == 1.0


# ---------------------------------------------------------------------------------------- links


def test_a_group_inside_a_node_uses_the_inner_link(mine: Hardware):
    for ranks, stride in ((2, 1), (8, 1), (4, 2), (2, 4), (1, 8)):
        assert mine.link(ranks, stride) == mine.intra


def test_a_group_with_one_rank_a_node_uses_its_port(mine: Hardware):
    for ranks, stride in ((2, 8), (4, 8), (2, 16)):
        assert mine.link(ranks, stride) == mine.inter


def test_a_group_with_several_ranks_a_node_leaves_it_by_several_ports(mine: Hardware):
    dense, sparse = mine.link(16, 1), mine.link(4, 4)
    assert dense.bandwidth("all_reduce") == 1e11, "8 ports of 2e10, and no more than the wire"
    assert dense.bandwidth_bytes_s == 1e11
    assert sparse.bandwidth("all_gather") == 4e10, "2 of the 4 ranks are on a node: 2 ports"
    assert sparse.name == "net, 2 ports a node"
    assert sparse.latency_s == mine.inter.latency_s
    # all-to-all: (n−m)/n of what a rank holds passes its port, where the formula counts (n−1)/n.
    assert sparse.bandwidth("all_to_all") == pytest.approx(2e10 * 3 / 2)


def test_the_slower_link_is_never_faster_than_the_inner_one(mine: Hardware):
    for name in (*PROFILES, mine):
        hardware = load_hardware(name)
        full = hardware.link(hardware.ranks_per_node, 1)
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            for nodes in (2, 4):
                across = hardware.link(nodes * hardware.ranks_per_node, 1)
                assert across.bandwidth(kind) <= full.bandwidth(kind)


def test_a_mesh_of_wires_gives_a_small_group_few_of_them():
    mi300x = load_hardware("mi300x")
    assert mi300x.link(8, 1).bandwidth_bytes_s == pytest.approx(336e9)
    assert mi300x.link(2, 1).bandwidth_bytes_s == pytest.approx(48e9)


def test_a_piece_of_a_ring_is_a_line_and_interleaved_groups_share_it():
    tpu = load_hardware("tpu-v5p")
    ring = tpu.intra.bandwidth_bytes_s
    assert tpu.link(16, 1).bandwidth_bytes_s == ring
    assert tpu.link(4, 1).bandwidth_bytes_s == ring / 2
    assert tpu.link(4, 4).bandwidth_bytes_s == ring / 4
    assert tpu.link(4, 2).bandwidth_bytes_s == ring / 4


def test_no_group_of_no_ranks(mine: Hardware):
    with pytest.raises(OptionsError, match="A group of 0 ranks, 1 apart, is no group"):
        mine.link(0, 1)


# --------------------------------------------------------------------------------------- errors


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(OptionsError) as error:
        load_hardware("h100-smx")
    assert "There is no hardware profile 'h100-smx'." in str(error.value)
    assert "Did you mean 'h100-sxm'" in str(error.value)
    assert all(name in str(error.value) for name in PROFILES)


def test_a_name_like_no_other():
    with pytest.raises(OptionsError, match="No name is near it"):
        load_hardware("zzz")


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(OptionsError) as error:
        load_hardware(str(tmp_path / "no.toml"))
    assert "The hardware profile cannot be read." in str(error.value)
    assert "no.toml" in str(error.value)


def test_a_directory_or_binary_file_is_a_readable_error(tmp_path: Path):
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "x.toml"):
        with pytest.raises(OptionsError, match=r"cannot be read"):
            load_hardware(path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"launch_s": ""}, "The key 'launch_s' is missing."),
        ({"launch": "1"}, "The key 'launch' is unknown."),
        ({"launch_s": '"fast"'}, "'launch_s' is 'fast'."),
        ({"launch_s": "-1e-6"}, "'launch_s' is -1e-06."),
        ({"launch_s": "inf"}, "'launch_s' is inf."),
        ({"launch_s": "nan"}, "'launch_s' is nan."),
        ({"fused_pointwise": "1"}, "'fused_pointwise' is 1."),
        ({"memory_bytes": "1.5"}, "'memory_bytes' is 1.5."),
        ({"memory_bytes": "inf"}, "'memory_bytes' is inf."),
        ({"ranks_per_node": "0"}, "'ranks_per_node' is 0."),
        ({"matmul_efficiency": "70"}, "'matmul_efficiency' is 70.0."),
        ({"memory_bandwidth_bytes_s": "0"}, "'memory_bandwidth_bytes_s' is 0.0."),
        ({"memory_bandwidth_bytes_s": "true"}, "'memory_bandwidth_bytes_s' is True."),
        ({"peak_flops": "1e12"}, "'peak_flops' is 1000000000000.0."),
        ({"peak_flops": "{}"}, "'peak_flops' is empty."),
        ({"peak_flops": '{ float32 = "x" }'}, "'peak_flops.float32' is 'x'."),
        ({"peak_flops": "{ float32 = 0 }"}, "'float32' is 0.0."),
        ({"intra": "3"}, "'intra' is 3, not a table"),
        ({"intra": '{ name = "w" }'}, "The key 'intra.latency_s' is missing."),
        ({"name": "3"}, "'name' is 3."),
    ],
)
def test_a_malformed_file_says_which_key(tmp_path: Path, changes: dict[str, str], what: str):
    path = tmp_path / "mine.toml"
    path.write_text(toml(**changes))
    with pytest.raises(OptionsError) as error:
        load_hardware(path)
    assert what in str(error.value)
    assert "mine.toml" in str(error.value)
    assert error.value.fix or "table" in what


def test_what_is_expected_of_a_key_is_said(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(toml(memory_bandwidth_bytes_s='"3 TB/s"'))
    with pytest.raises(OptionsError) as error:
        load_hardware(path)
    assert str(error.value) == (
        "'memory_bandwidth_bytes_s' is '3 TB/s'.\n"
        f"  where: {path}\n"
        "  fix:   Expected a number of bytes a second."
    )


def test_an_unknown_key_gives_the_nearest(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(toml(mem_bandwidth_bytes_s="1"))
    with pytest.raises(OptionsError, match="Did you mean 'memory_bandwidth_bytes_s'"):
        load_hardware(path)


def test_text_that_is_not_toml_or_json(tmp_path: Path):
    for kind in ("toml", "json"):
        path = tmp_path / f"x.{kind}"
        path.write_text("{{")
        with pytest.raises(OptionsError, match=f"not valid {kind.upper()}"):
            load_hardware(path)
    path.write_text("[1]")
    with pytest.raises(OptionsError, match="not a table of keys and values"):
        load_hardware(path)


def test_json_works_as_toml_does(tmp_path: Path, mine: Hardware):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(mine.to_dict()))
    assert load_hardware(path) == load_hardware(str(path)) == mine


def test_a_link_refuses_what_it_does_not_know():
    with pytest.raises(OptionsError, match="'topology' is 'torus'") as error:
        Link("x", 0.0, 1.0, 0.0, topology="torus")
    assert "link 'x'" in str(error.value)
    with pytest.raises(OptionsError, match="unknown kind 'broadcast'"):
        Link("x", 0.0, 1.0, 0.0, kind_bandwidths_bytes_s=(("broadcast", 1.0),))
    with pytest.raises(OptionsError, match="'all_gather' is 0"):
        Link("x", 0.0, 1.0, 0.0, kind_bandwidths_bytes_s=(("all_gather", 0.0),))


def test_a_kind_of_collective_may_have_its_own_rate():
    link = Link("x", 0.0, 4.0, 0.0, kind_bandwidths_bytes_s=(("all_gather", 2.0),))
    assert [link.bandwidth(kind) for kind in KINDS] == [4.0, 2.0, 4.0, 4.0]


# -------------------------------------------------------------------------------------- compute


def test_the_roofline_is_the_slower_of_arithmetic_and_memory(mine: Hardware):
    assert roofline_s(1e12, 1.0, "float32", mine) == pytest.approx(2.0)
    assert roofline_s(1e12, 1.0, "bfloat16", mine) == pytest.approx(0.5)
    assert roofline_s(1.0, 1e12, "float32", mine) == pytest.approx(1.0)
    assert roofline_s(1.0, 1.0, "float32", mine) == mine.launch_s
    assert roofline_s(0.0, 0.0, "float32", mine) == 0.0, "a view is free"


def test_llama_matmul_on_h100_is_compute_bound():
    h100 = load_hardware("h100-sxm")
    m, k, n = 8192, 4096, 14336
    flops, traffic = 2.0 * m * k * n, 2.0 * (m * k + k * n + m * n)
    assert roofline_s(flops, traffic, "bfloat16", h100) == pytest.approx(1.39e-3, rel=0.02)


def test_ideal_hardware_has_no_floor():
    assert 0 < roofline_s(1.0, 1.0, "float32", load_hardware("ideal")) < 1e-10


def test_the_roofline_s_formula_is_the_function(mine: Hardware):
    from autoshard.cost.compute import roofline_formula

    formula, source = roofline_formula()
    values = {"flops": 3e12, "bytes": 1e12, "peak": 5e11, "bandwidth": 1e12, "launch": 1e-6}
    by_symbol = {symbol: values[str(symbol)] for symbol in formula.free_symbols}
    assert len(by_symbol) == 5
    assert float(formula.subs(by_symbol)) == pytest.approx(roofline_s(3e12, 1e12, "float32", mine))
    assert "Roofline" in source


def test_itemsizes_are_torch_s():
    import torch

    for name, size in DTYPE_BYTES.items():
        dtype = getattr(torch, name)
        assert str(dtype) == f"torch.{name}"
        assert dtype.itemsize == itemsize(name) == size
    names = {str(v)[6:] for v in vars(torch).values() if isinstance(v, torch.dtype)}
    assert {n for n in names if not n.startswith(("bits", "quint", "qint"))} <= set(DTYPE_BYTES)


def test_an_unknown_dtype():
    with pytest.raises(OptionsError, match=r"no dtype 'bfloat61'\.\n.*Did you mean bfloat16"):
        itemsize("bfloat61")


def test_rates_may_be_infinite_and_times_zero():
    ideal = load_hardware("ideal")
    assert ideal.intra.bandwidth_bytes_s == math.inf
    assert ideal.launch_s == ideal.intra.launch_s == ideal.inter.latency_s == 0.0
