"""Where a program runs: the simulator, which carries every rank in this process, or the interface
that `runtime.distributed` keeps for one rank of a process group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from autoshard.plan_types import Plan
from autoshard.rewrite import Leaf, Program
from autoshard.runtime import simulator


class Backend(Protocol):
    """How tensors are held and a program is run."""

    @property
    def device(self) -> torch.device | None:
        """Where the program runs; None where the model was captured."""
        ...

    def agree(self, plan: Plan) -> None:
        """Check that every rank has the same plan, before any collective of it runs."""
        ...

    def compare(self, what: str, text: str) -> None:
        """Check that every rank has the same `text`, which says how it decided `what`."""
        ...

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Check that every rank was given the same inputs."""
        ...

    def check_random_state(self) -> None:
        """Check that every rank will draw the same random numbers."""
        ...

    def hold(self, leaf: Leaf, whole: Tensor) -> nn.Parameter | Tensor:
        """What the sharded module keeps of an original parameter or buffer."""
        ...

    def place(self, leaf: Leaf, held: Tensor) -> Tensor:
        """A held buffer as a program's `leaf` takes it: itself, or laid out anew."""
        ...

    def to_device(self, x: Tensor) -> Tensor:
        """A constant, where the program runs."""
        ...

    def compile(self, program: Program) -> GraphModule:
        """The program as a module that one rank could run."""
        ...

    def run(self, program: Program, tensors: Sequence[Tensor], module: GraphModule) -> list[Tensor]:
        """Run the program on its leaves, in order; whole results."""
        ...

    def whole(self, x: Tensor) -> Tensor:
        """A held tensor, whole."""
        ...

    def fit(self, given: Tensor, held: Tensor) -> Tensor:
        """A loaded tensor, in the form that `held` has."""
        ...


class SimulatorBackend:
    """Every rank in this process. Tensors are held whole; each rank takes its slice, differentiably."""

    device = None

    def agree(self, plan: Plan) -> None:
        """There is one process, and it does."""

    def compare(self, what: str, text: str) -> None:
        """There is one process."""

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """There is one process."""

    def check_random_state(self) -> None:
        """There is one process."""

    def hold(self, leaf: Leaf, whole: Tensor) -> nn.Parameter | Tensor:
        """A copy of the original."""
        copy = whole.detach().clone()
        if leaf.op.kind == "parameter":
            return nn.Parameter(copy, requires_grad=whole.requires_grad)
        return copy

    def place(self, leaf: Leaf, held: Tensor) -> Tensor:
        """It is whole."""
        return held

    def to_device(self, x: Tensor) -> Tensor:
        """Constants are where they were captured."""
        return x

    def compile(self, program: Program) -> GraphModule:
        """The rank's program, to read: it names mesh axes, not process groups."""
        return graph_module(program.graph)

    def run(self, program: Program, tensors: Sequence[Tensor], module: GraphModule) -> list[Tensor]:
        """All ranks, in lockstep."""
        ranks = [
            simulator.written(x, leaf.layout, program.mesh)
            if leaf.written
            else simulator.spread(x, leaf.layout, program.mesh, leaf.op.target)
            for leaf, x in zip(program.leaves, tensors, strict=True)
        ]
        made = simulator.run(program.graph, ranks, program.mesh)
        return [simulator.collect(item) for item in made]

    def whole(self, x: Tensor) -> Tensor:
        """They are."""
        return x

    def fit(self, given: Tensor, held: Tensor) -> Tensor:
        """A sharded tensor is gathered."""
        return given.full_tensor() if hasattr(given, "full_tensor") else given  # type: ignore[operator]


def graph_module(graph: Graph) -> GraphModule:
    """A graph with no attributes of its own, as a module."""
    return GraphModule(torch.nn.Module(), graph, "Rank")
