"""Every architecture of `transformers` and `diffusers`: is it sharded soundly, and how much of it?

Of each, a tiny model with random weights is built (`zoo_models`), sharded on the in-process simulator under the profile
`ideal` (links so fast that whatever can be split soundly is), and held to the unsharded model: outputs and every
gradient, in float64 where the model can (`zoo_judge`).

    python benchmarks/zoo.py                                  # all of them, on 2 ranks
    python benchmarks/zoo.py --ranks 2 3 4 --search tensor all llama "diffusers:*"

Prints a line for each, then a scoreboard, and writes every record to a file of JSON lines. Exits 1 where one is WRONG.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import zoo_judge
import zoo_models
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from zoo_judge import Run, noise_of, rounded, step

import autoshard
from autoshard.errors import AutoshardError, CaptureError

DEEP = 0.9
"""The share of weight bytes from which on a model counts as split."""


STATUSES = ("sound", "WRONG", "failed", "refused", "unstable", "too slow", "not built")


@dataclass(frozen=True)
class Record:
    """One architecture on some ranks: what became of it.

    `status`: `sound`; `WRONG` (it computes something else); `refused` (an error of autoshard's that says why); `failed`
    (any other error: a defect); `unstable` (rounding alone changes it); `not built` (the zoo's own limit); `too slow`.
    """

    architecture: str
    ranks: int
    search: str
    status: str
    why: str = ""
    task: str = ""
    dtype: str = ""
    split: float | None = None
    plan_s: float | None = None
    error: float | None = None
    worst: str = ""
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reference:
    """A model, its step, and the noise of it."""

    built: zoo_models.Built
    model: torch.nn.Module
    kwargs: dict[str, Any]
    wanted: Run
    noise: dict[str, float]
    dtype: str


def reference(architecture: str) -> Reference:
    """Build it and run it in float64, or in float32 where it can't.

    Raises:
        NotBuiltError: the zoo can build no tiny model of it.
    """
    built = zoo_models.build(architecture)
    for dtype in (torch.float64, torch.float32):
        model = copy.deepcopy(built.model).to(dtype)
        kwargs = {n: _cast(x, dtype) for n, x in built.kwargs.items()}
        try:
            wanted = step(model, kwargs)
            noise = noise_of(wanted, [rounded(model, kwargs, seed) for seed in (1, 2)])
        except (RuntimeError, NotImplementedError):
            if dtype == torch.float32:
                raise
            continue
        model.zero_grad(set_to_none=True)
        return Reference(built, model, kwargs, wanted, noise, str(dtype).removeprefix("torch."))
    raise AssertionError("float32 either runs or raises")


def fresh(ref: Reference) -> torch.nn.Module:
    """The model before it has run: some keep what they computed, and cannot be copied then."""
    return copy.deepcopy(ref.built.model).to(getattr(torch, ref.dtype))


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def score(ref: Reference, ranks: int, search: str) -> Record:
    """Shard it, run a step, compare."""
    blank = Record(ref.built.architecture, ranks, search, "", task=ref.built.task, dtype=ref.dtype)
    start = time.perf_counter()
    try:
        sharded = autoshard.autoshard(
            fresh(ref), ranks, (), ref.kwargs, hardware="ideal", search=search
        )
    except AutoshardError as error:
        status = "refused" if isinstance(error, CaptureError) else "failed"
        return _with(blank, status=status, why=_first_line(error))
    plan_s = round(time.perf_counter() - start, 2)
    verdict = zoo_judge.judge(step(sharded, ref.kwargs), ref.wanted, ref.noise)
    status, why = verdict.status, ""
    if _ties(sharded) != _ties(ref.model):
        status, why = "WRONG", "parameters are tied otherwise than before"
    elif status != "sound":
        why = f"{verdict.worst} is off by {verdict.error:.1e}, rounding by {verdict.noise:.1e}"
    plan = sharded.plan
    return _with(
        blank,
        status=status,
        why=why,
        split=split_share(plan),
        plan_s=plan_s,
        error=verdict.error,
        worst=verdict.worst,
        fallbacks=tuple(sorted({f.op for f in plan.fallbacks})),
    )


def split_share(plan: autoshard.Plan) -> float:
    """The share of the bytes of weights with two dims or more that are stored split."""
    matrices = [w for w in plan.weights if len(w.shape) > 1]
    whole = sum(_elements(w.shape) for w in matrices)
    split = sum(_elements(w.shape) for w in matrices if w.split != "replicated")
    return round(split / whole, 4) if whole else 1.0


def _elements(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _ties(model: torch.nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return sorted(sorted(group) for group in names.values())


def _with(record: Record, **changes: Any) -> Record:
    return Record(**{**asdict(record), **changes})


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


# ------------------------------------------------------------------------------- a process each


def _score_one(
    architecture: str, wanted: list[tuple[int, str]], pipe: Connection
) -> None:  # in a process of its own
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        ref = reference(architecture)
    except zoo_models.NotBuiltError as error:
        pipe.send([Record(architecture, n, s, "not built", why=str(error)) for n, s in wanted])
        return
    except Exception as error:  # noqa: BLE001 - the model's own code, unsharded
        pipe.send([Record(architecture, n, s, "not built", _first_line(error)) for n, s in wanted])
        return
    for ranks, search in wanted:
        try:
            pipe.send([score(ref, ranks, search)])
        except Exception as error:  # noqa: BLE001 - whatever comes out is a defect to be shown
            pipe.send([Record(architecture, ranks, search, "failed", _first_line(error))])


@dataclass
class _Running:
    """A process that scores an architecture, and what it has still to send."""

    process: Any
    pipe: Connection
    left: list[tuple[int, str]]
    until: float


def scores(
    names: Sequence[str], wanted: Sequence[tuple[int, str]], jobs: int, limit_s: float
) -> Iterator[Record]:
    """Score architectures in `jobs` processes at a time, forked from one that has imported all there is to import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zoo"])
    waiting, running = list(names), dict[str, _Running]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_score_one, args=(name, list(wanted), theirs))
            process.start()
            theirs.close()
            running[name] = _Running(process, ours, list(wanted), time.monotonic() + limit_s)
        wait([r.pipe for r in running.values()], timeout=1.0)
        for name, run in list(running.items()):
            yield from _received(name, run)
            if not run.left:
                run.process.kill()
                run.process.join()
                del running[name]


def _received(name: str, run: _Running) -> Iterator[Record]:
    while run.left and run.pipe.poll():
        try:
            records = run.pipe.recv()
        except EOFError:
            yield from (Record(name, n, s, "failed", "its process ended") for n, s in run.left)
            run.left.clear()
            return
        del run.left[: len(records)]
        yield from records
    if run.left and time.monotonic() > run.until:
        yield from (Record(name, n, s, "too slow") for n, s in run.left)
        run.left.clear()


# ----------------------------------------------------------------------------------- the scoreboard


def scoreboard(records: Sequence[Record]) -> Table:
    """A column for each number of ranks and search; a row for each status, then shares and times."""
    table = Table(title=f"{len({r.architecture for r in records})} architectures")
    table.add_column("")
    columns = sorted({(r.search, r.ranks) for r in records})
    for search, ranks in columns:
        table.add_column(f"{search}, {ranks} ranks", justify="right")
    groups = [[r for r in records if (r.search, r.ranks) == column] for column in columns]
    for status in STATUSES:
        table.add_row(status, *(str(sum(r.status == status for r in group)) for group in groups))
    shares = [[r.split for r in group if r.split is not None] for group in groups]
    times = [[r.plan_s for r in group if r.plan_s is not None] for group in groups]
    table.add_row(f"{DEEP:.0%} split", *(str(sum(x >= DEEP for x in s)) for s in shares))
    table.add_row("median split", *(f"{median(s):.1%}" if s else "" for s in shares))
    table.add_row("median planning", *(f"{median(t):.1f} s" if t else "" for t in times))
    return table


def hand_written() -> tuple[int, int]:
    """Of how many configurations `transformers` has a tensor-parallel plan, and how many it has."""
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    kinds = {name: auto.CONFIG_MAPPING[name] for name in auto.CONFIG_MAPPING_NAMES}
    return sum(bool(getattr(k, "base_model_tp_plan", None)) for k in kinds.values()), len(kinds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures or patterns; all where left out")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--search", nargs="+", default=["tensor"], choices=["tensor", "all"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one architecture")
    parser.add_argument("--output", type=Path, default=Path("out/zoo.jsonl"))
    given = parser.parse_args(arguments)
    every = zoo_models.architectures()
    names = [n for n in every if not given.names or any(fnmatch.fnmatch(n, p) for p in given.names)]
    wanted = list(itertools.product(given.ranks, given.search))
    given.output.parent.mkdir(parents=True, exist_ok=True)
    console, records = Console(), []
    with given.output.open("w") as file, Progress(console=console) as progress:
        bar = progress.add_task("architectures", total=len(names) * len(wanted))
        for record in scores(names, wanted, given.jobs, given.limit_s):
            records.append(record)
            file.write(json.dumps(asdict(record)) + "\n")
            file.flush()
            progress.advance(bar)
            share = "" if record.split is None else f"{record.split:6.1%} split"
            console.print(
                f"{record.architecture:36} {record.ranks} {record.search:6} {record.status:9} {share:14} {record.why}",
                highlight=False,
                markup=False,
            )
    console.print(scoreboard(records))
    planned, configurations = hand_written()
    console.print(f"transformers has a tensor-parallel plan for {planned} of {configurations} configurations.")  # fmt: skip
    return int(any(r.status in ("WRONG", "failed") for r in records))


if __name__ == "__main__":
    sys.exit(main())
