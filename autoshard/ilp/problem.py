"""The choice among strategies as a problem, in no solver's language.

Each node picks one of its strategies. Each tensor is made in one state and wanted in others; a
conversion that several consumers want is paid once. The problem is to pick at the least total cost.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A decision: one of the strategies of `count` equal operators.

    Attributes:
        key: names it in messages.
        count: how many operators decide alike.
        costs_s: seconds of one operator, by strategy.
        ties: by strategy, what is added to break ties between equal costs; dimensionless.
        bytes: by strategy, bytes of memory that one operator keeps.
        transient_bytes: by strategy, bytes that it needs only while it runs.
    """

    key: str
    count: int
    costs_s: tuple[float, ...]
    ties: tuple[float, ...]
    bytes: tuple[int, ...]
    transient_bytes: tuple[int, ...]


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
class Problem:
    """Nodes, the tensors between them, and a budget of bytes (None: unbounded)."""

    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    budget_bytes: int | None = None

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

    def bytes(self, choice: tuple[int, ...]) -> int:
        """Bytes of memory of a choice at its peak: all that is kept, and the largest transient."""
        kept = sum(n.count * n.bytes[s] for n, s in zip(self.nodes, choice, strict=True))
        return kept + self.transient_bytes(choice)

    def transient_bytes(self, choice: tuple[int, ...]) -> int:
        """The largest transient of a choice."""
        return max(
            (n.transient_bytes[s] for n, s in zip(self.nodes, choice, strict=True)), default=0
        )


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
