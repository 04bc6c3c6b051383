"""The choice among strategies as a problem, in no solver's language.

Each node picks one of its strategies. Each tensor is made in one state and wanted in others; a
conversion that several consumers want is paid once. The problem is to pick at the least total cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Node:
    """A decision: one of the strategies of `count` equal operators.

    Attributes:
        key: names it in messages.
        count: how many operators decide alike.
        costs_s: seconds of one operator, by strategy.
        ties: by strategy, what is added to break ties between equal costs; dimensionless.
    """

    key: str
    count: int
    costs_s: tuple[float, ...]
    ties: tuple[float, ...]


@dataclass(frozen=True)
class Use:
    """One consumer of a tensor.

    Attributes:
        node: which.
        wants: by strategy of that node, the index of the state it wants.
        pairs: the (have, want) that are possible.
    """

    node: int
    wants: tuple[int, ...]
    pairs: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Tensor:
    """A tensor, `count` times over, between the node that makes it and those that take it.

    Attributes:
        producer: the node that makes it.
        count: how many such tensors there are.
        haves: by strategy of the producer, the index of the state it is left in.
        uses: who takes it.
        costs_s: seconds of each possible conversion, forward and backward, by (have, want).
        ties: what is added for each conversion to break ties.
    """

    producer: int
    count: int
    haves: tuple[int, ...]
    uses: tuple[Use, ...]
    costs_s: dict[tuple[int, int], float]
    ties: dict[tuple[int, int], float]


@dataclass(frozen=True)
class Hold:
    """Memory that is held for parts of a step, as much as strategies say.

    Attributes:
        kind: what it is for; see `PARTS`.
        spans: from which moment to which each of it is held, both included.
        node: the node that decides how large one of it is: `sizes` are by its strategies.
        tensor: or the tensor, of which copies are held: `copies` are pairs of states and bytes, and one is
            held where any of `uses` takes the tensor from one of its states to the other, and none of
            `unless` does.
    """

    kind: str
    spans: Sequence[tuple[int, int]]
    node: int = -1
    sizes: tuple[int, ...] = ()
    tensor: int = -1
    uses: tuple[int, ...] = ()
    unless: tuple[int, ...] = ()
    copies: tuple[tuple[frozenset[tuple[int, int]], int], ...] = ()

    def count(self, moment: int) -> int:
        """How many of it are held at a moment."""
        return sum(1 for first, last in self.spans if first <= moment <= last)


PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "buffers",
    "gathered",
    "transient",
)
"""What memory is for: stored weights, their gradients, optimizer state, what autograd keeps for backward,
buffers and inputs, weights gathered for use, and what is there for a while alone: temporaries, gradients
of activations, results."""


@dataclass(frozen=True)
class Problem:
    """Nodes, the tensors between them, the memory they hold, and a budget of bytes (None: unbounded).

    Attributes:
        nodes, tensors: what is decided.
        budget_bytes: at most so much memory at any moment, slack included.
        holds: the memory.
        moments: of a step.
        slack: what an allocator needs beside what is held, as a fraction of it.
    """

    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    budget_bytes: int | None = None
    holds: tuple[Hold, ...] = ()
    moments: int = 1
    slack: float = 0.0

    def conversions(self, choice: tuple[int, ...]) -> list[tuple[Tensor, int, int]]:
        """The (tensor, have, want) that a choice of strategies has to convert, each once."""
        found = []
        for tensor in self.tensors:
            have = tensor.haves[choice[tensor.producer]]
            wants = {use.wants[choice[use.node]] for use in tensor.uses}
            found += [
                (tensor, have, want) for want in sorted(wants) if (have, want) in tensor.costs_s
            ]
        return found

    def possible(self, choice: tuple[int, ...]) -> bool:
        """Whether every tensor can be had as it is wanted."""
        return all(
            (tensor.haves[choice[tensor.producer]], use.wants[choice[use.node]]) in use.pairs
            for tensor in self.tensors
            for use in tensor.uses
        )

    def cost_s(self, choice: tuple[int, ...]) -> float:
        """Seconds of a choice, without ties, summed in a fixed order."""
        compute = sum(n.count * n.costs_s[s] for n, s in zip(self.nodes, choice, strict=True))
        moved = sum(t.count * t.costs_s[have, want] for t, have, want in self.conversions(choice))
        return compute + moved

    def tie(self, choice: tuple[int, ...]) -> float:
        """The tie-break of a choice."""
        own = sum(n.count * n.ties[s] for n, s in zip(self.nodes, choice, strict=True))
        return own + sum(t.count * t.ties[have, want] for t, have, want in self.conversions(choice))

    def held_bytes(self, hold: Hold, choice: tuple[int, ...]) -> int:
        """How large one of `hold` is, with these strategies."""
        if hold.tensor < 0:
            return hold.sizes[choice[hold.node]]
        tensor = self.tensors[hold.tensor]
        have = tensor.haves[choice[tensor.producer]]

        def taken(uses: tuple[int, ...]) -> set[tuple[int, int]]:
            return {(have, tensor.uses[u].wants[choice[tensor.uses[u].node]]) for u in uses}

        some, none = taken(hold.uses), taken(hold.unless)
        return sum(size for pairs, size in hold.copies if pairs & some and not pairs & none)

    def timeline(self, choice: tuple[int, ...]) -> dict[str, list[int]]:
        """Bytes held at each moment, by kind."""
        changes = {kind: [0] * (self.moments + 1) for kind in PARTS}
        for hold in self.holds:
            if size := self.held_bytes(hold, choice):
                line = changes[hold.kind]
                for first, last in hold.spans:
                    line[first] += size
                    line[last + 1] -= size
        return {kind: list(accumulate(line[:-1])) for kind, line in changes.items()}

    def peak(self, choice: tuple[int, ...]) -> tuple[int, int]:
        """The first moment at which most is held, and how much with the allocator's slack, in bytes."""
        total = list(map(sum, zip(*self.timeline(choice).values(), strict=True)))
        live = max(total, default=0)
        return total.index(live), self.with_slack(live)

    def with_slack(self, live_bytes: int) -> int:
        """What an allocator needs to hold so much."""
        return live_bytes + math.ceil(live_bytes * self.slack)

    def bytes(self, choice: tuple[int, ...]) -> int:
        """Bytes of memory of a choice at its peak."""
        return self.peak(choice)[1]


@dataclass(frozen=True)
class Solution:
    """A choice of strategies and how it was found.

    Attributes:
        choice: a strategy's index for each node.
        solver: "HiGHS" or "CBC".
        status: a sentence.
        objective_s: seconds, recomputed from the choice.
        bound_s: proved lower bound of it.
        binaries, constraints: size of the program.
        wall_s: time to solution.
    """

    choice: tuple[int, ...]
    solver: str
    status: str
    objective_s: float
    bound_s: float
    binaries: int
    constraints: int
    wall_s: float

    @property
    def gap(self) -> float:
        """How far the objective may be from the optimum, as a share of it."""
        if self.objective_s <= 0:
            return 0.0
        return max(0.0, (self.objective_s - self.bound_s) / self.objective_s)
