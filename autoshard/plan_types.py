"""The plan: every decision of a solve, frozen, with its costs and its reasons.

This module holds the nouns alone. `plan_json` reads and writes them, `report` shows them; neither
needs torch, so a plan made on a cluster can be read anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoshard.cost.optimizer import ADAMW, Optimizer
from autoshard.errors import PlanError
from autoshard.ilp.problem import PARTS
from autoshard.mesh import Mesh
from autoshard.placement import Layout

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from autoshard.sensitivity import Sensitivity

SCHEMA_VERSION = 3
SCALES = ("arithmetic", "memory", "bandwidth", "latency", "launch")
"""What a part of a step's time may scale with."""


@dataclass(frozen=True)
class WeightRecord:
    """How one weight is stored.

    Attributes:
        fqns: every name of the weight: more than one where weights are tied.
        shape, dtype: of the whole weight.
        split: "column", "row", "replicated", or a kind that says more ("vocab", "expert", "shard").
        placements: one a mesh axis.
        local_shape: what one rank holds.
        stored_bytes: of the local shape.
        reason: one sentence on why.
        group: the FQN with the indices of repeated layers starred: `layers.*.mlp.down_proj.weight`.
        trainable: whether it gets a gradient.
    """

    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    split: str
    placements: Layout
    local_shape: tuple[int, ...]
    stored_bytes: int
    reason: str
    group: str
    trainable: bool = True

    @property
    def fqn(self) -> str:
        """The first of the weight's names."""
        return self.fqns[0]


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of a training step, with how many times it runs.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        axis: the mesh axis it runs on.
        phase: "forward" or "backward".
        tensor_shape: of the whole tensor, before it is split.
        bytes: of the whole tensor on one rank, as the collective's formula takes them, for one run.
        count: how many times it runs in a step.
        time_s: predicted, for one run.
        module: where, with the indices of repeated layers starred: forward, that of the operator that
            made the tensor; backward, that of all the operators whose gradients of it meet.
        op: that operator, or the first of those.
        reason: one sentence on why.
    """

    kind: str
    axis: str
    phase: str
    tensor_shape: tuple[int, ...]
    bytes: int
    count: int
    time_s: float
    module: str
    op: str
    reason: str


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, in a step.

    Each part is the most that there is of it at any moment: all gradients when backward ends, all that
    is kept for backward when it begins. They are not all there at once; `at_peak` says what is.

    Attributes:
        weights_bytes, gradients_bytes, optimizer_bytes: of the weights that a rank stores.
        activations_bytes: what autograd keeps for backward.
        transient_bytes: temporaries, and gradients and results that are needed for a while.
        buffers_bytes: buffers, constants and inputs.
        gathered_bytes: weights that are stored split, gathered for use.
        slack_bytes: what the allocator needs beside all that, at the peak.
        at_peak: bytes of each part at the moment at which most is held, in the order of `ilp.problem.PARTS`; ()
            where all of them are there at once.
        peak_at: that moment, in words.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    transient_bytes: int
    buffers_bytes: int = 0
    gathered_bytes: int = 0
    slack_bytes: int = 0
    at_peak: tuple[int, ...] = ()
    peak_at: str = ""

    def __post_init__(self) -> None:
        if self.at_peak and len(self.at_peak) != len(PARTS):
            raise PlanError(
                f"at_peak has {len(self.at_peak)} parts.", fix=f"They are {', '.join(PARTS)}."
            )

    @property
    def parts(self) -> dict[str, int]:
        """Bytes at the peak, by what they are for."""
        most = [getattr(self, f"{name}_bytes") for name in PARTS]
        return dict(zip(PARTS, self.at_peak or most, strict=True))

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once, with the allocator's slack."""
        return sum(self.parts.values()) + self.slack_bytes


@dataclass(frozen=True)
class Part:
    """Seconds that scale with a rate, and with powers of the batch and of the sequence.

    Attributes:
        seconds: as planned.
        scales_with: "arithmetic" (peak FLOP/s), "memory" (memory bandwidth), "bandwidth" and
            "latency" (of links), or "launch" (nothing: fixed times of kernels and collectives).
        batch, sequence: powers of the batch size and of the sequence length it grows with.
    """

    seconds: float
    scales_with: str
    batch: int = 0
    sequence: int = 0

    def __str__(self) -> str:
        """As a plan's JSON has it: seconds, what they scale with, and the powers."""
        return f"{self.seconds!r} {self.scales_with} {self.batch} {self.sequence}"

    @staticmethod
    def parse(text: str) -> Part:
        """The part that `str` wrote.

        Raises:
            PlanError: it is none.
        """
        try:
            seconds, scales_with, batch, sequence = text.split(" ")
            found = Part(float(seconds), scales_with, int(batch), int(sequence))
        except ValueError:
            found = None
        if found is None or found.scales_with not in SCALES:
            raise PlanError(
                f"'{text}' is no part of a time.",
                fix="It is written as seconds, what they scale with, and the powers of batch and "
                "sequence: 1.5e-06 memory 1 1.",
            )
        return found


@dataclass(frozen=True)
class CostTerm:
    """A part of a step's time: the greatest of several sums, or the least of them.

    A kernel takes what the slowest of arithmetic, memory and launch takes; a collective runs by the
    quickest of its algorithms. Equal kernels are one term.

    Attributes:
        pick: "max" or "min"; "max" where there is one sum.
        options: the sums.
    """

    pick: str
    options: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True)
class Cost:
    """What a step is predicted to take on one rank.

    Attributes:
        compute_s: time in operators (and in the optimizer, when training).
        comm_s: time in collectives and local conversions; they are not assumed to overlap.
        memory: bytes on one rank.
        baselines: the same record for known plans of the same model: "replicated", "megatron", …
        terms: step_s taken apart, for `Plan.sensitivity`.
    """

    compute_s: float
    comm_s: float
    memory: Memory
    baselines: dict[str, Cost] = field(default_factory=dict)
    terms: tuple[CostTerm, ...] = ()

    @property
    def step_s(self) -> float:
        """Predicted time of one step."""
        return self.compute_s + self.comm_s


@dataclass(frozen=True)
class SolverRecord:
    """How the plan was found.

    Attributes:
        name: "HiGHS" or "CBC".
        status: a sentence: "optimal", "stopped at the time limit with a gap", …
        objective_s: predicted step time of the plan, without tie-breaks.
        bound_s: proved lower bound of it.
        gap: (objective − bound) / objective.
        binaries, constraints: size of the integer program.
        wall_s: time to solution; not part of a plan's value, nor of its JSON, whose bytes are
            deterministic. 0 where it is not known.
    """

    name: str
    status: str
    objective_s: float
    bound_s: float
    gap: float
    binaries: int
    constraints: int
    wall_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class FallbackRecord:
    """An operator without a rule, which therefore runs whole on every rank.

    Attributes:
        op: the operator.
        count: how many times it is in the graph.
        cost_s: the predicted time of all of them, which splitting might have shared.
        modules: where, with the indices of repeated layers starred.
    """

    op: str
    count: int
    cost_s: float
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """The strategy of one class of operators: equal operators at one place of repeated layers.

    Attributes:
        key: names the class: module path with starred indices, operator, position.
        count: how many operators it has.
        strategy: as text: `S(0) I -> P`, with the lowering in brackets where there is one.
    """

    key: str
    count: int
    strategy: str


@dataclass(frozen=True)
class Plan:
    """How a model is sharded over a mesh: what `autoshard.plan` returns and `autoshard` applies.

    Attributes:
        model: the class of the model.
        fingerprint: hash of the captured graph the plan is for.
        mesh, hardware, mode, search: as planned for.
        memory_budget_bytes: the budget a rank, or None.
        weights, collectives, fallbacks, cost, solver: see the records; weights in the model's order,
            collectives in the order they run.
        choices: every operator's strategy, by class.
        notes: sentences the report shows: what was not sharded and why, limits met.
    """

    model: str
    fingerprint: str
    mesh: Mesh
    hardware: str
    mode: str
    search: str
    memory_budget_bytes: int | None
    weights: tuple[WeightRecord, ...]
    collectives: tuple[CollectiveRecord, ...]
    fallbacks: tuple[FallbackRecord, ...]
    cost: Cost
    solver: SolverRecord
    choices: tuple[Choice, ...]
    notes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    """The example inputs it was planned for: `input_ids int64[4, 2048]`."""
    uniform: bool = True
    """Whether repeated layers share their decisions."""
    constraints: tuple[tuple[str, str], ...] = ()
    """The constraints it was solved under: (glob of FQNs, split)."""
    hardware_hash: str = ""
    """`Hardware.hash` of the profile that its costs are from."""
    optimizer: Optimizer = ADAMW
    """Whose memory was planned for."""

    def to_json(self) -> str:
        """The plan as JSON text, by the schema `autoshard/schema/plan.schema.json`."""
        from autoshard.plan_json import to_json

        return to_json(self)

    def save(self, path: str | Path) -> None:
        """Write the plan's JSON to `path`; an existing file is replaced whole or not at all."""
        from autoshard.plan_json import save

        save(self, path)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: the text is damaged, is no plan, or has an unknown version.
        """
        from autoshard.plan_json import from_json

        return from_json(text)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan saved at `path`.

        Raises:
            PlanError: there is no such file, or it is damaged, no plan, or of an unknown version.
        """
        from autoshard.plan_json import load

        return load(path)

    def report(self, console: Console | None = None) -> None:
        """Print the plan as tables: weights, collectives, time and memory, the solver's line."""
        from autoshard.report.plan_report import print_plan

        print_plan(self, console)

    def explain(self, fqn: str) -> str:
        """Why the weight `fqn` is stored as it is, what it costs, and what touches it.

        Raises:
            PlanError: the plan has no such weight; the nearest names are given.
        """
        from autoshard.report.explain import explain

        return explain(self, fqn)

    def sensitivity(self) -> Sensitivity:
        """How step time moves with link bandwidth, latency, batch and sequence, as formulas."""
        from autoshard.sensitivity import sensitivity

        return sensitivity(self)

    def diff(self, other: Plan) -> str:
        """What differs from `other`, as text; empty where nothing does."""
        from autoshard.report.diff import diff

        return diff(self, other)
