"""`autoshard calibrate`: what it fits from known times, what it refuses, and a short run on gloo."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autoshard.cost.calibration import Calibration, Measured, _predicted, calibrated
from autoshard.cost.comm import algorithms
from autoshard.cost.hardware import Hardware, load_hardware
from autoshard.cost.link import KINDS
from autoshard.cost.profile_file import save_hardware
from autoshard.errors import CalibrationError, OptionsError
from autoshard.runtime.calibrate import _timed, calibrate
from autoshard.runtime.measure import Stopwatch
from autoshard.runtime.probes import of, of_compute

BASE = load_hardware("cpu-gloo")
TRUTH = replace(
    BASE,
    synchronous=True,
    launch_s=2e-6,
    memory_bandwidth_bytes_s=20e9,
    peak_flops=(("float32", 150e9), ("bfloat16", 300e9), ("float64", 70e9)),
    vector_flops=9e9,
    efficiencies=(("attention", 0.6), ("convolution", 0.8)),
    step_s=4e-4,
    parameter_s=3e-5,
    conversion_s=2e-5,
    update_bandwidth_bytes_s=15e9,
    intra=replace(
        BASE.intra,
        latency_s=60e-6,
        launch_s=90e-6,
        bandwidth_bytes_s=1.2e9,
        kind_bandwidths_bytes_s=(("all_gather", 0.7e9),),
        kind_launches_s=(),
        measured=True,
    ),
)


def times(truth: Hardware) -> list[Measured]:
    """What a machine that is exactly `truth` would measure."""
    found = [probe.what for probe in of_compute(torch.device("cpu"), quick=False)]
    found += [Measured("parameter", f"{n}", 0.0, count=n) for n in (8, 32, 128)]
    found += [Measured("conversion", "20", 0.0, count=20)]
    found += [Measured("update", "AdamW", 0.0, bytes=2.0**28)]
    found += [
        Measured(kind, f"{kind} {size} {ranks}", 0.0, bytes=float(size), ranks=ranks)
        for kind in KINDS
        for ranks in (2, 4)
        for size in (2**12, 2**15, 2**18, 2**21, 2**24)
    ]
    return [replace(item, seconds=_predicted(truth, item)) for item in found]


def check(found: Calibration, rel: float) -> None:
    got = found.hardware
    for name in ("launch_s", "memory_bandwidth_bytes_s", "vector_flops", "step_s", "parameter_s"):
        assert getattr(got, name) == pytest.approx(getattr(TRUTH, name), rel=rel), name
    assert got.update_rate == pytest.approx(TRUTH.update_rate, rel=rel)
    assert got.conversion_s == pytest.approx(TRUTH.conversion_s, rel=rel)
    for name in ("peak_flops", "efficiencies"):
        assert dict(getattr(got, name)) == pytest.approx(dict(getattr(TRUTH, name)), rel=rel)
    assert got.intra.latency_s == pytest.approx(TRUTH.intra.latency_s, rel=rel)
    for kind in KINDS:
        assert got.intra.bandwidth(kind) == pytest.approx(TRUTH.intra.bandwidth(kind), rel=rel)
        assert got.intra.launch(kind) == pytest.approx(TRUTH.intra.launch(kind), rel=rel)


def test_exact_times_give_the_machine_back() -> None:
    found = calibrated(BASE, times(TRUTH))
    check(found, 0.02)
    assert max(abs(fit.residual) for fit in found.fits) < 0.03


@pytest.mark.parametrize("seed", range(3))
def test_outliers_do_not_spoil_it(seed: int) -> None:
    """A tenth of the times are several times too long; the rest are 2 % off."""
    draw = random.Random(seed)
    noisy = [
        replace(item, seconds=item.seconds * draw.uniform(0.98, 1.02)) for item in times(TRUTH)
    ]
    often = [i for i, item in enumerate(noisy) if item.group in ("memory", "product", *KINDS)]
    for index in draw.sample(often, len(noisy) // 10):
        noisy[index] = replace(noisy[index], seconds=noisy[index].seconds * draw.uniform(2, 6))
    found = calibrated(BASE, noisy).hardware
    assert found.memory_bandwidth_bytes_s == pytest.approx(20e9, rel=0.15)
    assert found.peak("float32") == pytest.approx(150e9, rel=0.15)
    for kind in KINDS:
        assert found.intra.bandwidth(kind) == pytest.approx(TRUTH.intra.bandwidth(kind), rel=0.3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_no_time_is_an_error(seconds: float) -> None:
    given = times(TRUTH)
    given[5] = replace(given[5], seconds=seconds)
    with pytest.raises(CalibrationError, match="no measurement"):
        calibrated(BASE, given)


@pytest.mark.parametrize("group", ["launch", "memory", "product"])
def test_a_missing_measurement_is_an_error(group: str) -> None:
    with pytest.raises(CalibrationError, match=f"No {group} was measured"):
        calibrated(BASE, [item for item in times(TRUTH) if item.group != group])


def test_a_measured_link_is_priced_as_measured() -> None:
    """No algorithm that was not measured is taken for quicker, in whichever size of group."""
    link = calibrated(BASE, times(TRUTH)).hardware.intra
    assert link.measured
    for kind in KINDS:
        assert len(algorithms(kind, link)) == 1
    assert algorithms("all_reduce", replace(link, measured=False)) == ("ring", "tree")


def test_noise_that_leaves_nothing_of_a_collective_is_an_error() -> None:
    """A difference of two times that stays below zero is no measurement."""
    watch = Stopwatch(torch.device("cpu"), 1e-4, 1)
    probe = of("all_reduce", "4 KiB", lambda: lambda: None)
    slow = replace(probe, without=lambda: lambda: time.sleep(2e-3))
    with pytest.raises(CalibrationError, match="no measurement"):
        calibrated(BASE, [*times(TRUTH), _timed(slow, watch)])


def test_a_link_that_was_not_measured_is_named() -> None:
    found = calibrated(BASE, times(TRUTH))
    assert found.hardware.inter == BASE.inter
    assert any("between nodes" in sentence for sentence in found.assumed)


def test_a_measurement_that_fails_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Stopwatch, run: object) -> float:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(Stopwatch, "seconds", fails)
    with pytest.raises(CalibrationError, match=r"launch .* failed: connection closed"):
        calibrate()


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_profile_is_read_as_it_was_written(suffix: str, tmp_path: Path) -> None:
    for name in ("cpu-gloo", "h100-sxm", "ideal", "tpu-v5p"):
        try:
            profile = load_hardware(name)
        except OptionsError:
            continue
        profile = replace(profile, source='A "quoted" source\\path.')
        save_hardware(profile, tmp_path / f"p{suffix}")
        again = load_hardware(tmp_path / f"p{suffix}")
        assert replace(again, source=again.source.strip()) == profile


# --- the command -----------------------------------------------------------------------------------


def command(*arguments: str, **options) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
    return subprocess.Popen(
        [sys.executable, "-m", "autoshard", "calibrate", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        env=environment | {"COLUMNS": "100"}, **options,
    )  # fmt: skip


@pytest.mark.gloo
@pytest.mark.slow
def test_two_ranks_write_a_profile_that_plans(tmp_path: Path) -> None:
    """Every part is there, and residuals are shown; the numbers themselves are the machine's."""
    target = tmp_path / "mine.json"
    run = command("--ranks", "2", "--quick", "--output", str(target))
    out, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    for text in ("mine", "off by", "all_to_all", "product", "No group between nodes"):
        assert text in out
    assert str(target) in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    found = load_hardware(target)
    assert json.loads(target.read_text())["name"] == found.name == "mine"
    assert found.synchronous
    assert {kind for kind, _ in found.intra.kind_launches_s} == set(KINDS)
    assert found.parameter_s > 0
    assert "2 ranks on 1 node" in found.source


@pytest.mark.gloo
@pytest.mark.slow
def test_an_interrupt_leaves_the_old_profile(tmp_path: Path) -> None:
    target = tmp_path / "mine.toml"
    target.write_text("old")
    run = command("--ranks", "2", "--output", str(target), start_new_session=True)
    time.sleep(6)
    os.killpg(run.pid, signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
    assert target.read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--output", "x.yaml"], ".json or a .toml"),
        (["--output", "missing/x.json"], "folder that does not exist"),
        (["--ranks", "0"], "no number of processes"),
    ],
)
def test_bad_options_are_told_at_once(arguments: list[str], text: str, tmp_path: Path) -> None:
    run = command(*arguments, cwd=tmp_path)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 2
    assert text in err
    assert not list(tmp_path.iterdir())


@pytest.mark.gloo
@pytest.mark.slow
def test_axes_that_are_not_the_group_are_told_once(tmp_path: Path) -> None:
    run = command("--ranks", "2", "--mesh", "dp=2,tp=2", cwd=tmp_path)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 2
    assert err.count("make up 4 ranks, and 2 are running") == 1
    assert not list(tmp_path.iterdir())
