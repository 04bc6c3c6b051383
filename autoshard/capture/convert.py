"""Turn an exported program into plain data."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node

from autoshard.capture.captured import Captured
from autoshard.capture.gradients import carrying
from autoshard.capture.memory import pinned, updates_statistics, written
from autoshard.compat import OpOverload, is_functorch
from autoshard.errors import CaptureError
from autoshard.graph import Op, OpGraph, Ref, Slot, TensorMeta


def convert(program: torch.export.ExportedProgram, model: torch.nn.Module) -> Captured:
    """The program's graph as an `OpGraph`, and the torch objects behind it.

    Raises:
        CaptureError: the graph has an operator, or a value, that is no part of a tensor program.
    """
    graph = program.graph
    leaves, tensors, inputs = _leaves(program)
    reader = _Reader(leaves, pinned(graph), carrying(graph, trained(program)))
    for node in graph.nodes:
        reader.read(node)
    blocks = frozenset(
        name for name, child in model.named_modules() if any(True for _ in child.children())
    )
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    outputs = tuple(map(reader.value, list(output.args[0])))
    made = OpGraph(tuple(reader.ops), type(model).__name__, blocks)
    assert program.call_spec.in_spec is not None
    assert program.call_spec.out_spec is not None
    return Captured(
        made,
        graph,
        tensors,
        tuple(inputs),
        program.call_spec.in_spec,
        program.call_spec.out_spec,
        outputs,
        model.training,
        frozenset(
            spec.target
            for spec in program.graph_signature.input_specs
            if spec.kind == InputKind.BUFFER and not spec.persistent and spec.target
        ),
    )


def trained(program: torch.export.ExportedProgram) -> set[str]:
    """Names of the placeholders that take a gradient."""
    state, found = program.state_dict, set()
    given = {
        node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"
    }
    for spec in program.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        tensor = state.get(spec.target) if spec.target else given.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            found.add(name)
    return found


def _leaves(
    program: torch.export.ExportedProgram,
) -> tuple[dict[str, Op | None], dict[str, torch.Tensor], list[tuple[str, object]]]:
    """The ops of placeholders by name, the tensors they stand for, and the user's inputs in order.

    Names of one tensor (a tied weight) become one op, the first: uses of the others become uses of it.
    """
    leaves: dict[str, Op | None] = {}
    tensors: dict[str, torch.Tensor] = {}
    inputs: list[tuple[str, object]] = []
    first: dict[int, str] = {}
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind == InputKind.USER_INPUT:
            inputs.append((name, getattr(spec.arg, "value", None)))
            continue
        fqn, tensor = _tensor(program, spec, name)
        kind, known = _KINDS[spec.kind], first.setdefault(id(tensor), name)
        if known == name:
            leaves[name], tensors[name] = _leaf(name, kind, (fqn,), tensor), tensor
            continue
        tied = leaves[known]
        assert tied is not None
        leaves[name] = None
        leaves[known] = _leaf(known, tied.kind, (*tied.fqns, fqn), tensor)
        nodes[name].replace_all_uses_with(nodes[known])
    return leaves, tensors, inputs


def _tensor(
    program: torch.export.ExportedProgram, spec: Any, name: str
) -> tuple[str, torch.Tensor]:
    """The FQN and the tensor that an input stands for."""
    if spec.kind not in _KINDS or spec.target is None:
        raise CaptureError(f"An input of kind {spec.kind.name} is not supported.", name)
    state = program.state_dict
    found = state[spec.target] if spec.target in state else program.constants[spec.target]
    if not isinstance(found, torch.Tensor):
        raise CaptureError(
            f"The model holds a {type(found).__name__}, which is no tensor.", spec.target
        )
    return spec.target, found


_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


def _leaf(name: str, kind: str, fqns: tuple[str, ...], tensor: torch.Tensor) -> Op:
    grad = kind == "parameter" and tensor.requires_grad
    meta = TensorMeta(tuple(tensor.shape), str(tensor.dtype)[6:], grad)
    return Op(name, kind, fqns[0], results=(meta,), fqns=fqns)


class _Reader:
    """Reads fx nodes one after another into ops."""

    def __init__(self, leaves: dict[str, Op | None], pinned: set[Node], carries: set[Node]) -> None:
        self.ops: list[Op] = []
        self._leaves = leaves
        self._pinned = pinned
        self._carries = carries
        self._refs: dict[Node, Ref] = {}
        self._metas: dict[tuple, TensorMeta] = {}

    def read(self, node: Node) -> None:
        """Add the op of one node; nodes that only name part of another add none."""
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "call_function":
            if getattr(node.target, "__name__", "") == "getitem":
                source, index = node.args
                self._refs[node] = Ref(self._refs[source].op, index)  # type: ignore[index,arg-type]
            else:
                self._call(node)
        elif node.op == "output":
            operands = tuple(dict.fromkeys(self._refs[n] for n in node.all_input_nodes))
            slots = tuple(map(Slot, range(len(operands))))
            self.ops.append(Op(node.name, "output", "output", slots, operands=operands))
        elif node.op != "get_attr":  # the body of an operator that is refused where it is called
            raise CaptureError(f"A node of kind {node.op} is not supported.", node.name)

    def value(self, item: Any) -> Any:
        """An output: a `Ref`, or the plain value itself."""
        return self._refs[item] if isinstance(item, Node) else item

    def _placeholder(self, node: Node) -> None:
        self._refs[node] = Ref(node.name)
        if node.name in self._leaves:
            op = self._leaves[node.name]
            if op is None:
                return
        else:
            val = node.meta.get("val")
            metas = ()
            if isinstance(val, torch.Tensor):
                metas = (self._result(val, node in self._carries),)
            op = Op(node.name, "input", node.name, results=metas)
        self.ops.append(op)

    def _call(self, node: Node) -> None:
        target = node.target
        if not isinstance(target, OpOverload):
            raise _foreign(node)
        operands: list[Ref] = []
        convert = self._convert
        args = tuple([convert(a, operands) for a in node.args])
        kwargs = tuple([(k, convert(v, operands)) for k, v in node.kwargs.items()])
        text = _text(target)
        grad = node in self._carries
        meta = node.meta
        val = meta.get("val")
        several = isinstance(val, (tuple, list))
        if not several and val is not None and not isinstance(val, torch.Tensor):
            raise _data_dependent(node)
        name = node.name
        try:
            metas = tuple([self._result(v, grad) for v in (val if several else (val,))])
        except _NotStatic as error:
            raise _data_dependent(node, shapes=True) from error
        self._refs[node] = Ref(name)
        stack = meta.get("nn_module_stack")
        self.ops.append(
            Op(
                name,
                "call",
                text,
                args,
                kwargs,
                tuple(operands),
                metas,
                next(reversed(stack.values()))[0] if stack else "",
                meta.get("stack_trace") or "",
                (),
                tuple(range(len(operands))) if node in self._pinned else (),
                bool(written(node)) or updates_statistics(node),
            )
        )

    def _result(self, val: Any, grad: bool) -> TensorMeta | None:
        if not isinstance(val, torch.Tensor):
            return None
        return self._meta(val, grad and (val.is_floating_point() or val.is_complex()))

    def _meta(self, val: torch.Tensor, grad: bool) -> TensorMeta:
        shape = tuple(val.shape)
        if not all(type(size) is int for size in shape):
            raise _NotStatic
        key = (shape, val.dtype, grad)
        if key not in self._metas:
            self._metas[key] = TensorMeta(shape, str(val.dtype)[6:], grad)
        return self._metas[key]

    def _convert(self, item: Any, operands: list[Ref]) -> Any:
        if isinstance(item, Node):
            operands.append(self._refs[item])
            return _slot(len(operands) - 1)
        if isinstance(item, (list, tuple)):
            return tuple([self._convert(i, operands) for i in item])
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, torch.dtype):
            return str(item)[6:]
        return type(item).__name__ if isinstance(item, torch.device) else str(item)


@cache
def _slot(position: int) -> Slot:
    return Slot(position)


class _NotStatic(Exception):
    """A size is not known before the program runs."""


@cache
def _text(target: OpOverload) -> str:
    return str(target)


def source_of(node: Node) -> str:
    """The user's source line that led to a node."""
    return Op(node.name, "call", str(node.target), trace=node.meta.get("stack_trace") or "").source


def _data_dependent(node: Node, *, shapes: bool = False) -> CaptureError:
    what = (
        "The shape of a tensor depends on the data."
        if shapes
        else "A Python number is read from a tensor, so that the program depends on the data."
    )
    fix = (
        "Give it a shape that is known: pad, mask or torch.where."
        if shapes
        else "Keep the value in a tensor."
    )
    return CaptureError(what, f"{node.target} at {source_of(node)}", fix)


def _foreign(node: Node) -> CaptureError:
    """An error about what the graph has instead of operators on tensors."""
    name = getattr(node.target, "__name__", str(node.target))
    if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _data_dependent(node)
    if is_functorch(node.target):
        name = f"torch.vmap or torch.func ({name})"
    elif "higher_order" in str(node.target):
        name = f"torch.{name}"
    return CaptureError(
        f"{name} is not supported.",
        source_of(node),
        "Write it with operators on whole tensors: batched operators, torch.where.",
    )
