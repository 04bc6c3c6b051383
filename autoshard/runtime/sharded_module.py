"""The sharded model: an `nn.Module` with the original's names, called as the original is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from autoshard.capture import Captured
from autoshard.compat import tree_flatten, tree_unflatten
from autoshard.errors import CaptureError
from autoshard.graph import Op, Ref
from autoshard.plan_types import Plan
from autoshard.rewrite import Leaf, Program
from autoshard.runtime.backend import Backend

Signature = tuple[Any, ...]


@dataclass(frozen=True)
class Prepared:
    """A program for one mode and one set of input shapes."""

    captured: Captured
    program: Program


Prepare = Callable[[tuple[Any, ...], dict[str, Any], bool], Prepared]


class ShardedModule(nn.Module):
    """A model that runs sharded by a plan: what `autoshard.autoshard` returns.

    It is called as the original model is and returns what it returns. `named_parameters()` and
    `state_dict()` have the original's FQNs. Under `torch.distributed` parameters are `DTensor`s on the
    mesh; in the simulator they are full tensors, which every simulated rank takes its slice of.

    Attributes:
        plan: the plan that it runs by.
        graph_module: what one rank runs, as a readable `torch.fx.GraphModule`.
        first: what was captured and rewritten first.
    """

    def __init__(self, plan: Plan, backend: Backend, first: Prepared, prepare: Prepare) -> None:
        super().__init__()
        self.plan = plan
        self._backend = backend
        self._prepare = prepare
        self._prepared = {_signature(first.captured.training, *_example(first.captured)): first}
        self._graph_modules: dict[int, GraphModule] = {}
        self.first = first
        self._adopt(first)
        self.train(first.captured.training)

    def _adopt(self, first: Prepared) -> None:
        """Make parameters and buffers of the original's, under all of their names."""
        for leaf in first.program.leaves:
            if leaf.op.kind not in ("parameter", "buffer"):
                continue
            held = self._backend.hold(leaf, first.captured.tensors[leaf.op.name])
            persistent = leaf.op.fqns[0] not in first.captured.transient
            for fqn in leaf.op.fqns:
                parent, name = self._home(fqn)
                if isinstance(held, nn.Parameter):
                    parent.register_parameter(name, held)
                else:
                    parent.register_buffer(name, held, persistent=persistent)

    def _home(self, fqn: str) -> tuple[nn.Module, str]:
        """The container of a name, made where it is missing, and the name's last part."""
        *path, name = fqn.split(".")
        home: nn.Module = self
        for part in path:
            if part not in home._modules:
                home.add_module(part, nn.Module())
            home = home.get_submodule(part)
        return home, name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run as the original model does, on this process's rank or on all simulated ones.

        Raises:
            CaptureError: for new input shapes or another mode, the model cannot be captured.
        """
        flat, spec = tree_flatten((args, kwargs))
        prepared = self._ready(args, kwargs, flat, spec)
        captured, program = prepared.captured, prepared.program
        inputs = {
            name: value
            for (name, _), value in zip(captured.inputs, flat, strict=True)
            if isinstance(value, Tensor)
        }
        tensors = [self._tensor(leaf, captured, inputs) for leaf in program.leaves]
        made = iter(self._backend.run(program, tensors, self._graph_module(program)))
        leaves = [next(made) if isinstance(item, Ref) else item for item in captured.outputs]
        return tree_unflatten(leaves, captured.out_spec)

    def _ready(self, args: tuple, kwargs: dict[str, Any], flat: list[Any], spec: Any) -> Prepared:
        """The program for this mode and these inputs, captured where it is new."""
        signature = _signature(self.training, flat, spec)
        if signature not in self._prepared:
            made = self._prepare(args, kwargs, self.training)
            if made.captured.in_spec != spec:
                raise CaptureError("The inputs do not have the form the model was captured with.")
            self._prepared[signature] = made
        return self._prepared[signature]

    def _tensor(self, leaf: Leaf, captured: Captured, inputs: Mapping[str, Tensor]) -> Tensor:
        if leaf.op.kind == "input":
            return inputs[leaf.op.name]
        if leaf.op.kind == "constant":
            return self._backend.to_device(captured.tensors[leaf.op.name])
        return self._stored(leaf.op)

    def _stored(self, op: Op) -> Tensor:
        home: nn.Module = self
        *path, name = op.fqns[0].split(".")
        for part in path:
            home = home._modules[part]  # type: ignore[assignment]
        found = home._parameters.get(name)
        if found is None:
            found = home._buffers[name]
        assert found is not None
        return found

    def _graph_module(self, program: Program) -> GraphModule:
        key = id(program)
        if key not in self._graph_modules:
            self._graph_modules[key] = self._backend.compile(program)
        return self._graph_modules[key]

    @property
    def graph_module(self) -> GraphModule:
        """What one rank runs."""
        return self._graph_module(self.first.program)

    def report(self) -> None:
        """Print the plan: weights, collectives, time and memory, the solver's line."""
        self.plan.report()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict with every tensor whole, on every rank."""
        return {name: self._backend.whole(value) for name, value in self.state_dict().items()}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a whole or a sharded state dict: whole tensors are split as the plan says."""
        mine = self.state_dict()
        fitted = {
            name: self._backend.fit(value, mine[name]) if name in mine else value
            for name, value in state_dict.items()
        }
        return super().load_state_dict(fitted, strict=strict, assign=assign)


def _example(captured: Captured) -> tuple[list[Any], Any]:
    """The flattened inputs a capture was made for: metas of tensors, and plain values."""
    metas = {op.name: op.results[0] for op in captured.graph.ops if op.kind == "input" and op.results}
    flat = [metas.get(name, value) for name, value in captured.inputs]
    return flat, captured.in_spec


def _signature(training: bool, flat: list[Any], spec: Any) -> Signature:
    """What a program depends on: the mode, the structure, shapes and dtypes, and plain values."""
    items = tuple([_item(value) for value in flat])
    return training, str(spec), items


def _item(value: Any) -> Any:
    if isinstance(value, Tensor):
        grad = value.requires_grad and value.is_floating_point()
        return tuple(value.shape), str(value.dtype)[6:], grad
    if hasattr(value, "shape") and hasattr(value, "grad"):
        return value.shape, value.dtype, value.grad
    return repr(value)
