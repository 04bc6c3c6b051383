"""Turn an exported program into plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node

from autoshard.capture.captured import Captured
from autoshard.compat import in_place_arguments, is_view
from autoshard.errors import CaptureError
from autoshard.graph import Op, OpGraph, Ref, Slot, TensorMeta

_NO_GRADIENT = frozenset({"aten.detach.default", "aten.zeros_like.default", "aten.ones_like.default",
                          "aten.empty_like.default", "aten.full_like.default", "aten.new_zeros.default",
                          "aten.new_ones.default", "aten.new_full.default", "aten.new_empty.default",
                          "aten.floor_divide.default", "aten.sign.default"})  # fmt: skip


def convert(program: torch.export.ExportedProgram, model: torch.nn.Module) -> Captured:
    """The program's graph as an `OpGraph`, and the torch objects behind it."""
    graph = program.graph
    leaves, tensors, inputs = _leaves(program)
    reader = _Reader(leaves, _pinned(graph))
    for node in graph.nodes:
        reader.read(node)
    blocks = frozenset(
        name for name, child in model.named_modules() if any(True for _ in child.children())
    )
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    outputs = tuple(reader.value(item) for item in output.args[0])  # type: ignore[union-attr]
    made = OpGraph(tuple(reader.ops), type(model).__name__, blocks)
    assert program.call_spec.in_spec is not None and program.call_spec.out_spec is not None
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


def _leaves(
    program: torch.export.ExportedProgram,
) -> tuple[dict[str, Op | None], dict[str, torch.Tensor], list[tuple[str, object]]]:
    """The ops of placeholders by name, the tensors they stand for, and the user's inputs in order.

    Names of one tensor (a tied weight) become one op: the first; the others map to it.
    """
    leaves: dict[str, Op | None] = {}
    tensors: dict[str, torch.Tensor] = {}
    inputs: list[tuple[str, object]] = []
    first: dict[int, str] = {}
    state, constants = program.state_dict, program.constants
    for spec in program.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind == InputKind.USER_INPUT:
            inputs.append((name, getattr(spec.arg, "value", None)))
            continue
        if spec.kind not in _KINDS or spec.target is None:
            raise CaptureError(f"An input of kind {spec.kind.name} is not supported.", name)
        tensor = state[spec.target] if spec.target in state else constants[spec.target]
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError("The model holds a script object.", spec.target)
        kind, known = _KINDS[spec.kind], first.setdefault(id(tensor), name)
        fqns = (spec.target,)
        if known != name:
            leaves[name] = None
            tied = leaves[known]
            assert tied is not None
            leaves[known] = _leaf(known, tied.kind, (*tied.fqns, spec.target), tensor)
            continue
        leaves[name], tensors[name] = _leaf(name, kind, fqns, tensor), tensor
    by_tensor = {id(t): n for n, t in tensors.items()}
    alias = {
        spec.arg.name: by_tensor[id(state.get(spec.target, constants.get(spec.target)))]  # type: ignore[union-attr]
        for spec in program.graph_signature.input_specs
        if getattr(spec.arg, "name", "") in leaves and leaves[spec.arg.name] is None
    }
    for node in program.graph.nodes:
        if node.name in alias:
            target = next(n for n in program.graph.nodes if n.name == alias[node.name])
            node.replace_all_uses_with(target)
    return leaves, tensors, inputs


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

    def __init__(self, leaves: dict[str, Op | None], pinned: set[Node]) -> None:
        self.ops: list[Op] = []
        self._leaves = leaves
        self._pinned = pinned
        self._refs: dict[Node, Ref] = {}
        self._grads: dict[Ref, bool] = {}
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
        else:
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
                grad = val.requires_grad and val.is_floating_point()
                metas = (self._meta(val, grad),)
            op = Op(node.name, "input", node.name, results=metas)
        self.ops.append(op)
        if op.results and op.results[0]:
            self._grads[Ref(op.name)] = op.results[0].grad

    def _call(self, node: Node) -> None:
        operands: list[Ref] = []
        convert = self._convert
        args = tuple([convert(a, operands) for a in node.args])
        kwargs = tuple([(k, convert(v, operands)) for k, v in node.kwargs.items()])
        target = str(node.target)
        grad = target not in _NO_GRADIENT and any(self._grads.get(ref, False) for ref in operands)
        val = node.meta.get("val")
        if not isinstance(val, (torch.Tensor, tuple, list)) and val is not None:
            raise _data_dependent(
                node, "A Python number is read from a tensor", "Keep the value in a tensor."
            )
        vals = val if isinstance(val, (tuple, list)) else (val,)
        sizes = [size for v in vals if isinstance(v, torch.Tensor) for size in v.shape]
        if not all(isinstance(size, int) for size in sizes):
            raise _data_dependent(
                node,
                "A tensor's shape depends on the values of another",
                "Keep shapes fixed: torch.where and a mask instead of selecting elements.",
            )
        metas = tuple([self._result(v, grad) for v in vals])
        self._refs[node] = Ref(node.name)
        for index, meta in enumerate(metas):
            if meta is not None:
                self._grads[Ref(node.name, index)] = meta.grad
        stack = node.meta.get("nn_module_stack")
        self.ops.append(
            Op(
                node.name,
                "call",
                target,
                args,
                kwargs,
                tuple(operands),
                metas,
                list(stack.values())[-1][0] if stack else "",
                node.meta.get("stack_trace") or "",
                (),
                tuple(range(len(operands))) if node in self._pinned else (),
                bool(in_place_arguments(node.target)),
            )
        )

    def _result(self, val: Any, grad: bool) -> TensorMeta | None:
        if not isinstance(val, torch.Tensor):
            return None
        return self._meta(val, grad and (val.is_floating_point() or val.is_complex()))

    def _meta(self, val: torch.Tensor, grad: bool) -> TensorMeta:
        key = (val.shape, val.dtype, grad)
        if key not in self._metas:
            shape = tuple([int(size) for size in val.shape])
            self._metas[key] = TensorMeta(shape, str(val.dtype)[6:], grad)
        return self._metas[key]

    def _convert(self, item: Any, operands: list[Ref]) -> Any:
        if isinstance(item, Node):
            ref = self._refs[item]
            operands.append(ref)
            return Slot(len(operands) - 1)
        if isinstance(item, (list, tuple)):
            return tuple([self._convert(i, operands) for i in item])
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, torch.dtype):
            return str(item)[6:]
        return type(item).__name__ if isinstance(item, torch.device) else str(item)


def _data_dependent(node: Node, what: str, fix: str) -> CaptureError:
    op = Op(node.name, "call", str(node.target), trace=node.meta.get("stack_trace") or "")
    where = f"{node.target} at {op.source}"
    return CaptureError(f"{what}, so that the program depends on the data.", where, fix)


def _pinned(graph: torch.fx.Graph) -> set[Node]:
    """The nodes that share memory with a tensor that some node writes to."""
    root: dict[Node, Node] = {}
    written: set[Node] = set()
    shares: Callable[[object], bool] = is_view
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        places = in_place_arguments(node.target) if node.op == "call_function" else ()
        named = getattr(node.target, "__name__", "") == "getitem"
        alias = node.op == "call_function" and (named or bool(places) or shares(node.target))
        root[node] = root.get(first, node) if alias and isinstance(first, Node) else node
        for index in places:
            argument = node.args[index] if index < len(node.args) else None
            if isinstance(argument, Node):
                written.add(root[argument])
    return {
        n
        for n, r in root.items()
        if r in written and n.op == "call_function" and (n is not r or in_place_arguments(n.target))
    }
