"""The sharded model: an `nn.Module` with the original's names, called as the original is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autoshard.capture import Captured
from autoshard.compat import (
    put_child,
    put_tensor,
    tensor_tables,
    tree_flatten,
    tree_flatten_with_names,
    tree_unflatten,
)
from autoshard.errors import CaptureError, OptionsError
from autoshard.graph import Ref
from autoshard.plan_types import Plan
from autoshard.rewrite import Leaf, Program
from autoshard.runtime.backend import Backend
from autoshard.runtime.masks import draws
from autoshard.runtime.rebind import rebind

if TYPE_CHECKING:
    from autoshard.runtime.again import Original

Signature = tuple[Any, ...]
CHECKS = ("first", "always", "never")


@dataclass(frozen=True)
class Prepared:
    """A program for one mode and one set of input shapes."""

    captured: Captured
    program: Program


class _Ready:
    """A program with the module that runs it."""

    def __init__(self, prepared: Prepared, backend: Backend) -> None:
        self.captured, self.program = prepared.captured, prepared.program
        self.module = backend.compile(prepared.program)
        self.draws = draws(prepared.captured.fx_graph)


class ShardedModule(nn.Module):
    """A model that runs sharded by a plan: what `autoshard.autoshard` returns.

    It is called as the original model is and returns what it returns. `named_parameters()` and
    `state_dict()` have the original's FQNs, in its order. Under `torch.distributed` parameters are
    `DTensor`s on the mesh; in the simulator they are full tensors, which every simulated rank takes its
    slice of. Build the optimizer from `parameters()` of this module; one that was built before can be
    moved over by `rebind`.

    For new input shapes, another mode or dtype, and frozen or unfrozen parameters, the model is captured
    and planned again at the next call, with the weights where they are.

    Attributes:
        plan: the plan that it runs by.
        graph_module: what one rank runs, as a readable `torch.fx.GraphModule`.
        first_prepared: what was captured and rewritten first.
        check_inputs: when the ranks compare their inputs, which must be the same on all, and torch's random
            state, where the model drops at random: "first", at the first call with new shapes; "always",
            which also finds a rank whose shapes alone are new, where the others would wait for it;
            "never". Nothing is compared inside `torch.compile`.
    """

    def __init__(self, plan: Plan, backend: Backend, first: Prepared, original: Original) -> None:
        super().__init__()
        self.plan = plan
        self.check_inputs = "first"
        self._backend = backend
        self._original = original
        self._modules_by_name = self._containers()
        self._adopt(first)
        kept = {name: t for name, t in first.captured.tensors.items() if _is_constant(first, name)}
        self.first_prepared = Prepared(replace(first.captured, tensors=kept), first.program)
        self._first = _Ready(self.first_prepared, backend)
        self._prepared = {self._signature(*_example(first.captured)): self._first}
        self._current = first.program
        self._checked: set[Signature] = set()

    def _containers(self) -> dict[str, nn.Module]:
        """The original's tree of submodules, empty, in its order and with its modes.

        They are put straight into their tables, as tensors are: a name that this class has too ("plan")
        is then no error, and still the name in the state dict.
        """
        found: dict[str, nn.Module] = {"": self}
        self.training = self._original.modes[""]
        for path, training in self._original.modes.items():
            if path:
                parent, _, name = path.rpartition(".")
                known = self._original.again.get(path)
                found[path] = found[known] if known is not None else nn.Module()
                found[path].training = training
                put_child(found[parent], name, found[path])
        return found

    def _adopt(self, first: Prepared) -> None:
        """Make parameters and buffers of the original's, under all of their names."""
        leaves = {fqn: leaf for leaf in first.program.leaves for fqn in leaf.op.fqns}
        held: dict[str, Tensor] = {}
        for fqn in self._original.names:
            if fqn not in leaves:
                continue
            op = leaves[fqn].op
            if op.name not in held:
                held[op.name] = self._backend.hold(leaves[fqn], first.captured.tensors[op.name])
            path, _, name = fqn.rpartition(".")
            persistent = fqn not in first.captured.transient
            put_tensor(self._modules_by_name[path], name, held[op.name], persistent=persistent)

    # --- running --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run as the original model does, on this process's rank or on all simulated ones.

        Raises:
            CaptureError: for new input shapes or another mode, the model cannot be captured.
            VerifyError: the ranks were given different inputs.
        """
        flat, spec = tree_flatten((args, kwargs))
        signature = self._signature(flat, spec)
        due = self.check_inputs == "always" or signature not in self._checked
        due = due and not torch.compiler.is_compiling()
        if due:
            self._check(signature, args, kwargs)
        ready = self._prepared.get(signature)
        if ready is None:
            ready = self._prepare(signature, args, kwargs, spec)
        if due and ready.draws and self.check_inputs != "never":
            self._backend.check_random_state()
        captured, program = ready.captured, ready.program
        if program is not self._current:
            self._place(program)
        inputs = {
            name: value
            for (name, _), value in zip(captured.inputs, flat, strict=True)
            if isinstance(value, Tensor)
        }
        tensors = [self._tensor(leaf, captured, inputs) for leaf in program.leaves]
        made = iter(self._backend.run(program, tensors, ready.module))
        leaves = [next(made) if isinstance(item, Ref) else item for item in captured.outputs]
        return tree_unflatten(leaves, captured.out_spec)

    def _signature(self, flat: list[Any], spec: Any) -> Signature:
        """What a program depends on: modes, autocast, kinds of stored tensors and of inputs, plain values."""
        modes = tuple([module.training for module in self._modules_by_name.values()])
        stored = tuple([(t.dtype, t.device.type, t.requires_grad) for t in self._stored_tensors()])
        return modes, self._autocast(), stored, str(spec), tuple([_item(value) for value in flat])

    def _autocast(self) -> torch.dtype | None:
        """What autocast around the call casts to, if there is one for the tensors' device."""
        kind = next((t.device.type for t in self._stored_tensors()), "cpu")
        known = torch.amp.is_autocast_available(kind)
        return torch.get_autocast_dtype(kind) if known and torch.is_autocast_enabled(kind) else None

    def _stored_tensors(self) -> list[Tensor]:
        return [
            tensor
            for module in self._modules_by_name.values()
            for table in tensor_tables(module)
            for tensor in table.values()
            if tensor is not None
        ]

    def _check(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the ranks compare their inputs."""
        if self.check_inputs not in CHECKS:
            raise OptionsError(
                f"check_inputs is {self.check_inputs!r}.",
                fix=f"Use {', '.join(map(repr, CHECKS))}.",
            )
        if self.check_inputs != "never":
            self._backend.check_inputs(tree_flatten_with_names(args, kwargs))
        self._checked.add(signature)

    def _prepare(
        self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any
    ) -> _Ready:
        """The program for inputs, modes or dtypes that are new."""
        modes = {name: module.training for name, module in self._modules_by_name.items()}
        made = self._original.prepare(args, kwargs, modes, self._stored())
        if made.captured.in_spec != spec:
            raise CaptureError("The inputs do not have the form the model was captured with.")
        self._prepared[signature] = _Ready(made, self._backend)
        return self._prepared[signature]

    def _stored(self) -> dict[str, Tensor]:
        """Parameters and buffers by every name."""
        return {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }

    def _place(self, program: Program) -> None:
        """Lay buffers out as `program` takes them."""
        for leaf in program.leaves:
            if leaf.op.kind == "buffer":
                placed = self._backend.place(leaf, self._held(leaf))
                for fqn in leaf.op.fqns:
                    path, _, name = fqn.rpartition(".")
                    tensor_tables(self._modules_by_name[path])[1][name] = placed
        self._current = program

    def _tensor(self, leaf: Leaf, captured: Captured, inputs: Mapping[str, Tensor]) -> Tensor:
        op = leaf.op
        if op.kind == "input":
            return inputs[op.name]
        if op.kind == "constant":
            return self._backend.to_device(captured.tensors[op.name])
        return self._held(leaf)

    def _held(self, leaf: Leaf) -> Tensor:
        """A parameter or buffer."""
        path, _, name = leaf.op.fqns[0].rpartition(".")
        parameters, buffers = tensor_tables(self._modules_by_name[path])
        found = parameters.get(name)
        return found if found is not None else buffers[name]  # type: ignore[return-value]

    @property
    def graph_module(self) -> GraphModule:
        """What one rank runs."""
        return self._first.module

    def report(self) -> None:
        """Print the plan: weights, collectives, time and memory, the solver's line."""
        self.plan.report()

    # --- state ----------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict with every tensor whole, on every rank; all ranks must call it."""
        return {name: self._backend.whole(value) for name, value in self.state_dict().items()}

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` of the parameters; gives the norm as a plain tensor.

        torch's function clips these parameters rightly too. The norm that it returns is a `DTensor` whose
        ranks hold shares: `full_tensor()` is the norm, `item()` is not.
        """
        norm = nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return self._backend.whole(norm)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load a whole or a sharded state dict: whole tensors are split as the plan says."""
        mine = self.state_dict()
        fitted = {
            name: self._backend.fit(value, mine[name])
            if name in mine and mine[name].shape == getattr(value, "shape", None)
            else value
            for name, value in state_dict.items()
        }
        return super().load_state_dict(fitted, strict=strict, assign=assign)

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Move an optimizer that was built on the original model's parameters over to this module's.

        Left as it is, it would go on updating the original, and nothing here would train. Its state
        (momentum, moments) is split as the parameters are.

        Raises:
            OptionsError: it holds a parameter that the original model did not have.
        """
        stored = self._stored()
        pairs = [(ref(), stored[name]) for name, ref in self._original.sources.items()]
        rebind(optimizer, {id(old): new for old, new in pairs if old is not None}, self._backend)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        """A copy with parameters and buffers of its own; the plan, programs and process group are shared."""
        programs = [self._current, self.first_prepared, *self._prepared.values()]
        for shared in (self.plan, self._backend, self._original, *programs):
            memo[id(shared)] = shared
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OptionsError(
            "A ShardedModule cannot be pickled: it is bound to this process and its process group.",
            fix="Save full_state_dict() or state_dict(), and the plan by plan.save(path).",
        )


def _is_constant(first: Prepared, name: str) -> bool:
    """Whether a tensor is neither a parameter nor a buffer: those are the module's own from now on."""
    return any(leaf.op.name == name and leaf.op.kind == "constant" for leaf in first.program.leaves)


def _example(captured: Captured) -> tuple[list[Any], Any]:
    """The flattened inputs a capture was made for: metas of tensors, and plain values."""
    metas = {
        op.name: op.results[0] for op in captured.graph.ops if op.kind == "input" and op.results
    }
    flat = [metas.get(name, value) for name, value in captured.inputs]
    return flat, captured.in_spec


def _item(value: Any) -> Any:
    if isinstance(value, Tensor):
        grad = value.requires_grad and value.is_floating_point()
        return tuple(value.shape), str(value.dtype)[6:], grad
    if hasattr(value, "shape") and hasattr(value, "grad"):
        return value.shape, value.dtype, value.grad
    return repr(value)
