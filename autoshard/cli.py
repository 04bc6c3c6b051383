"""The `autoshard` command: plan, show, explain, diff, verify, calibrate, hardware.

Exit status: 0 done, 1 a check failed (verify, diff --exit-code), 2 bad input, with one readable
message on stderr. What needs torch is imported by the subcommand that needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard import __version__
from autoshard.errors import AutoshardError, OptionsError, VerifyError

if TYPE_CHECKING:
    from autoshard.plan_types import Plan
    from autoshard.source import Source

DONE, FAILED, BAD_INPUT = 0, 1, 2
INTERRUPTED, PIPE_CLOSED = 130, 141
STDOUT = "-"

_SOURCE = """\
SOURCE is a callable that returns a model, or (model, args, kwargs):
  path.py:factory
  package.module:factory
or a config file of transformers, built without its weights:
  transformers:CONFIG.json
  transformers:CONFIG.json?batch=4&seq=2048
"""
_CALIBRATE = """\
Under torchrun, or another launcher that sets its variables, all ranks are measured at once, and the links
between them:
  torchrun --nproc-per-node 8 -m autoshard calibrate --output my-cluster.toml
Without one, --ranks N starts N processes on this machine; without that, one process is measured alone.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `argv` (default: the process's own) and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = make_parser().parse_args(arguments)
    options.arguments = arguments
    try:
        status = options.run(options)
        sys.stdout.flush()
    except AutoshardError as error:
        sys.stderr.write(f"autoshard: error: {error}\n")
        return FAILED if isinstance(error, VerifyError) else BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("autoshard: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone: let nothing more be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return status


# ---- the commands ---------------------------------------------------------------------------


def run_plan(options: argparse.Namespace) -> int:
    """Plan, save and show."""
    to_stdout = options.json == STDOUT
    if options.json and not to_stdout:
        _check_target(options.json)
    with _stdout_kept(to_stdout):
        plan = _plan(options)
        if options.json and not to_stdout:
            plan.save(options.json)
        _show(plan)
    if to_stdout:
        from autoshard.plan_json import encoded

        sys.stdout.buffer.write(encoded(plan))
    elif options.json:
        sys.stderr.write(f"The plan is saved in {options.json}.\n")
    return DONE


def run_show(options: argparse.Namespace) -> int:
    """Show a saved plan."""
    _show(_load(options.plan))
    return DONE


def run_explain(options: argparse.Namespace) -> int:
    """Show one weight of a saved plan."""
    sys.stdout.write(_load(options.plan).explain(options.fqn))
    return DONE


def run_diff(options: argparse.Namespace) -> int:
    """Show what differs between two saved plans."""
    text = _load(options.a).diff(_load(options.b))
    sys.stdout.write(text)
    return FAILED if text and options.exit_code else DONE


def run_verify(options: argparse.Namespace) -> int:
    """Compare the sharded program with the model."""
    given = _planning(options)
    if options.plan:
        given["plan"] = _load(options.plan)
    source = _source(options, device="cpu")
    from autoshard.api import verify

    with _progress() as say:
        found = verify(
            source.model, args=source.args, kwargs=dict(source.kwargs), progress=say, **given
        )
    found.report()
    return DONE if found.ok else FAILED


def run_calibrate(options: argparse.Namespace) -> int:
    """Measure this machine and write its profile."""
    from autoshard.cost.profile_file import checked_suffix

    checked_suffix(options.output)
    _check_target(options.output)
    from autoshard.runtime.start import start_ranks, started_group

    launched = os.environ.get("WORLD_SIZE")
    if options.ranks is not None and not launched:
        return start_ranks(options.arguments, options.ranks, os.environ)
    if options.ranks is not None and str(options.ranks) != launched:
        raise OptionsError(
            f"--ranks {options.ranks}, and the launcher started {launched}.",
            fix="Leave --ranks out under torchrun.",
        )
    with started_group(os.environ) as rank:
        return _calibrate(options, rank)


def _calibrate(options: argparse.Namespace, rank: int) -> int:
    """What every rank does; rank 0 shows and writes."""
    from autoshard.cost.hardware import load_hardware
    from autoshard.cost.profile_file import save_hardware
    from autoshard.mesh import Mesh
    from autoshard.report.calibration_report import print_calibration, progress
    from autoshard.runtime.calibrate import calibrate

    axes = [(a.name, a.size) for a in Mesh.parse(options.mesh).axes] if options.mesh else ()
    with progress() if rank == 0 else contextlib.nullcontext() as say:
        found = calibrate(
            options.name or Path(options.output).stem,
            axes=axes,
            quick=options.quick,
            base=load_hardware(options.like) if options.like else None,
            progress=say,
        )
    if rank == 0:
        save_hardware(found.hardware, options.output)
        print_calibration(found)
        sys.stderr.write(f"The profile is saved in {options.output}.\n")
    return DONE


def run_hardware(options: argparse.Namespace) -> int:
    """List the hardware profiles, or show one."""
    from autoshard.cost.hardware import hardware_names, load_hardware
    from autoshard.report.hardware_report import print_hardware, print_profile

    if options.name:
        print_profile(load_hardware(options.name))
    else:
        print_hardware([load_hardware(name) for name in hardware_names()])
    return DONE


# ---- what they share ------------------------------------------------------------------------


def _source(options: argparse.Namespace, device: str) -> Source:
    try:
        from autoshard.source import load_source

        return load_source(options.source, training=not options.infer, device=device)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise OptionsError("torch is not installed.", fix="pip install torch") from None


def _plan(options: argparse.Namespace) -> Plan:
    given = _planning(options)  # bad options are told before torch is imported
    source = _source(options, device="meta")
    from autoshard.api import plan

    with _progress() as say:
        return plan(
            source.model, args=source.args, kwargs=dict(source.kwargs), progress=say, **given
        )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A function that shows the name of the stage that runs, on stderr where that is a terminal."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda stage: status.update(f"{stage} …")


def _planning(options: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `autoshard.plan` that the user gave; the rest have its defaults."""
    from autoshard.mesh import Mesh

    if options.mesh is None and options.world_size is None and not getattr(options, "plan", None):
        raise OptionsError(
            "How many ranks?", fix="Give --world-size 8, or --mesh dp=2,tp=4 for several axes."
        )
    given = {
        "world_size": options.world_size,
        "mesh": Mesh.parse(options.mesh) if options.mesh else None,
        "hardware": options.hardware,
        "memory_budget": options.memory_budget,
        "optimizer": options.optimizer,
        "mode": "infer" if options.infer else None,
        "search": options.search,
        "constraints": _constraints(options.constraint),
        "solver": options.solver,
        "time_limit_s": options.time_limit,
        "uniform": False if options.no_uniform else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _constraints(texts: Sequence[str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for text in texts:
        glob, equals, split = text.rpartition("=")
        if not equals or not glob or not split:
            raise OptionsError(
                f"'{text}' is no constraint.", fix="Write --constraint '*.down_proj.weight=row'."
            )
        found[glob.strip()] = split.strip()
    return found or None


def _load(path: str) -> Plan:
    from autoshard.plan_json import load

    return load(path)


def _show(plan: Plan) -> None:
    from rich.console import Console

    plan.report(Console())


def _check_target(path: str) -> None:
    """Refuse, before any work, a file that could not be written after it."""
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        what = "is a folder" if Path(path).is_dir() else "is in a folder that does not exist"
        raise OptionsError(f"The file to save to {what}.", where=path)


@contextlib.contextmanager
def _stdout_kept(keep: bool) -> Iterator[None]:
    """While inside, whatever writes to stdout writes to stderr: Python's, and a solver's own, too."""
    if not keep:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


# ---- the arguments --------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line; `run` in its result is the command's function."""
    parser = argparse.ArgumentParser(
        prog="autoshard", description="Shards PyTorch models automatically, by ILP."
    )
    parser.add_argument("--version", action="version", version=f"autoshard {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    plan = _command(commands, "plan", run_plan, "plan how to shard a model", _SOURCE)
    _add_planning(plan)
    plan.add_argument("--json", metavar="FILE", help="save the plan; - writes it to stdout")

    show = _command(commands, "show", run_show, "show a saved plan")
    show.add_argument("plan", metavar="plan.json")

    explain = _command(commands, "explain", run_explain, "why a weight is stored as it is")
    explain.add_argument("plan", metavar="plan.json")
    explain.add_argument("fqn", metavar="FQN", help="a weight's name, or its group's")

    diff = _command(commands, "diff", run_diff, "what differs between two saved plans")
    diff.add_argument("a", metavar="a.json")
    diff.add_argument("b", metavar="b.json")
    diff.add_argument("--exit-code", action="store_true", help="exit with 1 where they differ")

    verify = _command(
        commands, "verify", run_verify, "compare the sharded program with the model", _SOURCE
    )
    _add_planning(verify)
    verify.add_argument("--plan", metavar="FILE", help="verify this plan instead of making one")

    calibrate = _command(
        commands, "calibrate", run_calibrate, "measure this machine; write its profile", _CALIBRATE
    )
    calibrate.add_argument("--output", metavar="FILE", default="measured.json", help=".json, .toml")
    calibrate.add_argument("--name", metavar="NAME", help="of the profile; default: the file's")
    calibrate.add_argument("--ranks", type=_count, metavar="N", help="start N processes here")
    calibrate.add_argument("--mesh", metavar="dp=2,tp=4", help="the axes to measure links on")
    calibrate.add_argument("--like", metavar="NAME", help="profile for what is not measured")
    calibrate.add_argument("--quick", action="store_true", help="fewer, shorter measurements")

    hardware = _command(commands, "hardware", run_hardware, "list the hardware profiles")
    hardware.add_argument("name", nargs="?", metavar="NAME", help="show all of this profile")
    return parser


def _count(text: str) -> int:
    """A number of processes."""
    if not text.isdecimal() or not 0 < int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of processes")
    return int(text)


def _command(
    commands: Any, name: str, run: Any, summary: str, epilog: str | None = None
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _add_planning(parser: argparse.ArgumentParser) -> None:
    """The arguments of `autoshard.plan`, named as they are there."""
    parser.add_argument("source", metavar="SOURCE", help="the model; see below")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks on one axis, tp")
    parser.add_argument("--mesh", metavar="dp=2,tp=4", help="ranks on several axes")
    parser.add_argument("--hardware", metavar="NAME", help="`autoshard hardware` lists them")
    parser.add_argument("--memory-budget", metavar="24GiB", help="at most this much a rank")
    parser.add_argument(
        "--optimizer", metavar="NAME", help="adamw, sgd, momentum, mixed-adamw, or bytes a weight"
    )
    parser.add_argument("--infer", action="store_true", help="plan for inference, not training")
    parser.add_argument("--search", choices=("tensor", "all"), help="what may be split")
    parser.add_argument(
        "--constraint", action="append", default=[], metavar="'GLOB=column'", help="repeatable"
    )
    parser.add_argument("--no-uniform", action="store_true", help="let repeated layers differ")
    parser.add_argument("--solver", metavar="NAME", help="HiGHS or CBC")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="of the solver")
