"""The pipeline, stage after stage: capture → decide → record → rewrite → run."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.capture import Captured, capture, with_footprints
from autoshard.cost.hardware import Hardware, load_hardware
from autoshard.cost.optimizer import Optimizer
from autoshard.errors import CaptureError, MeshError, OptionsError
from autoshard.mesh import Mesh
from autoshard.options import read_mesh, read_options
from autoshard.plan_types import Plan
from autoshard.planner import (
    Decided,
    Options,
    apply_plan,
    baselines,
    decide,
    follow_plan,
    record,
    recost,
    surveyed,
)
from autoshard.rewrite import rewrite
from autoshard.runtime.again import Original
from autoshard.runtime.backend import Backend, SimulatorBackend
from autoshard.runtime.compare import as_trial, compare
from autoshard.runtime.distributed import DistributedBackend, usable
from autoshard.runtime.sharded_module import Prepared, ShardedModule
from autoshard.verification import Verification

log = logging.getLogger("autoshard")
Progress = Callable[[str], None]


def plan(
    model: nn.Module,
    world_size: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Any = None,
    hardware: Hardware | str | None = None,
    memory_budget: int | str | None = None,
    optimizer: Optimizer | str | float | None = None,
    mode: str = "train",
    search: str | None = None,
    constraints: Mapping[str, str] | None = None,
    plan: Plan | str | Path | None = None,
    outputs: str = "invariant",
    inputs: str = "invariant",
    solver: str | None = None,
    time_limit_s: float = 60.0,
    uniform: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Plan how to shard `model` over several ranks; needs neither devices nor a process group.

    Args:
        model: on any device; on `meta` nothing is allocated.
        world_size: number of ranks of one mesh axis, "tp".
        args, kwargs: example inputs, as `torch.export.export` takes them. Where there are none, the
            model's own `example_input_array` or `dummy_inputs`.
        mesh: instead of world_size, a `Mesh`, a torch `DeviceMesh` or {"tp": 8}.
        hardware: a `Hardware`, the name of a profile, or the path of a profile's file; "h100-sxm".
        memory_budget: bytes a rank, or text like "24GiB".
        optimizer: whose memory a training step needs: "adamw", "adam", "sgd", "momentum", "mixed-adamw"
            (a float32 copy of the weight and two averages), bytes of state a weight, or an
            `autoshard.Optimizer`.
        mode: "train" prices backward, gradients and optimizer state; "infer" does not.
        search: "tensor" splits weights' dimensions alone, and uses every weight as it is stored;
            "all" may split batch and sequence too, and store weights split and gather them for use.
            Default: "tensor" with world_size, "all" with mesh.
        constraints: {glob of FQNs: "column" | "row" | "replicated" | "shard(dim)"}.
        plan: a plan, or its file: checked against the model, priced again (on `hardware`, where that is
            given) and given back; no solver runs.
        outputs, inputs: "invariant": every rank passes the same inputs and gets whole results.
        solver: "HiGHS" or "CBC"; default: the first that is installed.
        time_limit_s: for the solver; then the best plan so far is taken, with its gap.
        uniform: whether repeated layers share their decisions.
        progress: called with the name of each stage as it begins.

    Raises:
        CaptureError, ConstraintError, InfeasibleError, MeshError, OptionsError, PlanError, SolverError
    """
    say = progress or (lambda stage: None)
    if plan is not None:
        known = _loaded(plan)
        say("capture")
        return _applied(_captured(model, args, kwargs), known, hardware)[1]
    options = read_options(
        world_size, mesh, hardware, memory_budget, optimizer, mode, search, constraints, inputs, outputs,
        solver, time_limit_s, uniform,
    )  # fmt: skip
    say("capture")
    captured = _captured(model, args, kwargs)
    return _planned(captured, options, say)[1]


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """A block without passes of the cyclic collector, which would walk the whole captured model.

    Planning makes many small values and no cycles; on 80 layers the passes took half of its time.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def _planned(captured: Captured, options: Options, say: Progress) -> tuple[Decided, Plan]:
    say("solve")
    with _collector_paused():
        graph = with_footprints(captured)
        survey = surveyed(graph, options)
        decided = decide(graph, options, survey)
        say("compare with known plans")
        found = record(survey, decided, options, baselines(survey, options))
    return decided, replace(found, notes=(*captured.notes, *found.notes))


def _applied(
    captured: Captured, known: Plan, hardware: Hardware | str | None
) -> tuple[Decided, Plan]:
    """A known plan's strategies, and the plan with its costs as they are today, or on `hardware`."""
    profile = load_hardware(hardware) if hardware is not None else None
    decided, again, told = recost(with_footprints(captured), known, profile)
    if told:
        log.warning("%s", told)
    return decided, again


def autoshard(
    model: nn.Module,
    world_size: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Any = None,
    hardware: Hardware | str | None = None,
    memory_budget: int | str | None = None,
    optimizer: Optimizer | str | float | None = None,
    mode: str = "train",
    search: str | None = None,
    constraints: Mapping[str, str] | None = None,
    plan: Plan | str | Path | None = None,
    outputs: str = "invariant",
    inputs: str = "invariant",
    solver: str | None = None,
    time_limit_s: float = 60.0,
    uniform: bool = True,
    progress: Progress | None = None,
) -> ShardedModule:
    """Shard `model` over several ranks: plan, rewrite, and give back a module that runs so.

    Runs on `torch.distributed` where it is initialised with a world that fits the mesh; else in the
    in-process simulator, which carries every rank in this process. Nothing of `model` is changed.

    Args: as `plan` takes them. With `plan` given, it is applied as it is; no solver runs, and only its
        costs are brought up to date.

    Raises:
        CaptureError, ConstraintError, InfeasibleError, MeshError, OptionsError, PlanError, SolverError
    """
    say = progress or (lambda stage: None)
    known = _loaded(plan) if plan is not None else None
    if known is not None:
        _fits(known, world_size, mesh)
        options = None
    else:
        options = read_options(
            world_size, mesh, hardware, memory_budget, optimizer, mode, search, constraints, inputs,
            outputs, solver, time_limit_s, uniform,
        )  # fmt: skip
    wanted = known.mesh if known else options.mesh if options else None
    assert wanted is not None
    say("capture")
    captured = _captured(model, args, kwargs)
    return _shard(
        model, captured, known, options, _backend(wanted, mesh, _device(model)), say, hardware
    )


def _shard(
    model: nn.Module,
    captured: Captured,
    known: Plan | None,
    options: Options | None,
    backend: Backend,
    say: Progress,
    hardware: Hardware | str | None = None,
) -> ShardedModule:
    """Shard what was captured, by a plan that is known or by options to solve for one."""
    if known is not None:
        backend.agree(known)
        decided, known = _applied(captured, known, hardware)
    else:
        assert options is not None
        decided, known = _planned(captured, options, say)
        backend.agree(known)
    say("rewrite")
    program = rewrite(captured, decided, backend.device)
    original = Original(model, known, backend, options)
    return ShardedModule(known, backend, Prepared(captured, program), original)


def verify(
    model: nn.Module,
    world_size: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | str | Path | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> Verification:
    """Compare the sharded model with the unsharded one, in float64, on the in-process simulator.

    Outputs, every gradient, and every parameter after an optimizer step are compared; where they
    differ, the first graph node whose value does is named. Where the model drops at random, the captured
    graph is compared with the model under one seed, and the sharded program with the captured graph with
    nothing dropped on either side: masks of a split tensor are each rank's own.

    Args: as `autoshard` takes them, and
        tolerance: the greatest relative error accepted: 1e-9, or 1e-5 where the model computes in
            float32 whatever its weights are.

    Raises:
        as `autoshard`, and VerifyError where the model cannot be run.
    """
    known, say = None, options.pop("progress", None) or (lambda stage: None)
    if plan is not None:
        known = _loaded(plan)
        _fits(known, world_size, options.pop("mesh", None))
    chosen = None if known is not None else _options(world_size, **options)
    say("capture")
    own = _captured(model, args, kwargs)
    if not args and not kwargs:
        args, kwargs = _own_examples(model)
    if known is not None:
        apply_plan(own.graph, known)
    else:
        assert chosen is not None
        known = _planned(own, chosen, say)[1]
    say("compare")
    trial = as_trial(model, args, kwargs)
    captured = capture(trial.model, trial.args, trial.kwargs)
    decided, backend = follow_plan(captured.graph, known), SimulatorBackend()
    first = Prepared(captured, rewrite(captured, decided, backend.device))
    again = Original(trial.model, known, backend, chosen)
    return compare(trial, ShardedModule(known, backend, first, again), tolerance)


def _options(world_size: int | None, **given: Any) -> Options:
    """Options from keyword arguments, as `plan` takes them."""
    defaults = {
        "mesh": None, "hardware": None, "memory_budget": None, "optimizer": None, "mode": "train",
        "search": None, "constraints": None, "inputs": "invariant", "outputs": "invariant", "solver": None,
        "time_limit_s": 60.0, "uniform": True, "progress": None,
    }  # fmt: skip
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise OptionsError(
            f"Unknown option {', '.join(unknown)}.", fix=f"Known: {', '.join(defaults)}."
        )
    chosen = {**defaults, **given}
    chosen.pop("progress")
    return read_options(world_size, **chosen)


def _loaded(plan: Plan | str | Path) -> Plan:
    return plan if isinstance(plan, Plan) else Plan.load(plan)


def _fits(known: Plan, world_size: int | None, mesh: Any) -> None:
    """Check a plan's mesh against the one asked for."""
    if world_size is None and mesh is None:
        return
    asked = read_mesh(world_size, mesh)
    if asked.sizes != known.mesh.sizes:
        raise MeshError(
            f"The plan is for the mesh {known.mesh}, and {asked} is asked for.",
            fix="Plan again for this mesh.",
        )


def _captured(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Captured:
    if isinstance(model, ShardedModule):
        raise OptionsError("The model is sharded already.", fix="Shard the original model.")
    if not isinstance(model, nn.Module):
        raise OptionsError(f"{type(model).__name__} is no nn.Module.", fix="Pass the model itself.")
    if not args and not kwargs:
        args, kwargs = _own_examples(model)
    return capture(model, args, kwargs)


def _own_examples(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs that a model carries itself: Lightning's and transformers' names for them."""
    example = getattr(model, "example_input_array", None)
    if example is None:
        example = getattr(model, "dummy_inputs", None)
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    if isinstance(example, torch.Tensor):
        return (example,), {}
    raise CaptureError(
        f"{type(model).__name__} needs example inputs to be captured.",
        fix="Pass them as args=(…) or kwargs={…}: only their shapes and dtypes matter.",
    )


def _device(model: nn.Module) -> torch.device:
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def _backend(mesh: Mesh, asked: Any, device: torch.device) -> Backend:
    if usable(mesh.size, asked):
        return DistributedBackend(mesh, asked, device)
    if mesh.size > 1:
        log.info("No process group fits %s: every rank runs in this process, simulated.", mesh)
    return SimulatorBackend()
