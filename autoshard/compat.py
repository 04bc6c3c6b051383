"""Everything that autoshard uses of torch beyond its public names, in one place.

`TORCH_INTERNALS` lists it; a test checks that each still exists.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.export import _trace as export_trace
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

TORCH_INTERNALS = (
    "torch._ops.OpOverload",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.ops.aten._to_copy",
    "torch.ops.aten._unsafe_view",
    "torch.ops.aten._assert_tensor_metadata",
    "torch.ops.aten._assert_scalar",
    "torch.ops.aten._assert_async",
    "torch._functorch",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.distributed.tensor.placement_types._StridedShard",
    "torch._library",
    "torch.export._trace",
    "torch.fx._lazy_graph_module",
    "torch.utils._pytree",
    "torch._C._distributed_c10d._resolve_process_group",
    "torch.ops._c10d_functional.wait_tensor",
)

__all__ = [
    "ASSERTIONS", "GRAD", "TO_COPY", "UNSAFE_VIEW", "FakeTensor", "FakeTensorMode",
    "OpOverload", "TorchDispatchMode", "TreeSpec", "aliased_arguments", "attributes_watched",
    "code_when_called", "functional_collectives", "functional_twin", "functions_applied_by",
    "has_backward_hooks", "in_place_arguments", "is_functorch", "local_tensor",
    "marked_grad_mode", "no_inference_mode", "process_group", "put_child", "put_tensor",
    "quiet_export", "schema_arguments", "schema_name", "serves_an_operator", "sharded_like",
    "spec_of", "storage_key", "strided_shard", "tensor_tables", "transformers_export_patches",
    "tree_flatten", "tree_flatten_with_names", "tree_map", "tree_unflatten", "version",
]  # fmt: skip


@cache
def in_place_arguments(target: object) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an operator writes to, by its schema."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(_arguments(target))
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def aliased_arguments(target: object) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an operator's results may share memory with."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(_arguments(target))
        if argument.alias_info is not None
    )


def _arguments(target: object) -> list[Any]:
    schema = getattr(target, "_schema", None)
    return schema.arguments if schema is not None else []


def version(x: torch.Tensor) -> int:
    """How many times a tensor has been written to."""
    return x._version


def schema_name(target: Any) -> str:
    """An operator's name, without its overload: `aten::add`."""
    return target._schema.name


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks that run in backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def is_functorch(target: object) -> bool:
    """Whether a node's target is a piece of `torch.vmap` or `torch.func`."""
    return (getattr(target, "__module__", "") or "").startswith("torch._functorch")


TO_COPY = torch.ops.aten._to_copy.default
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
ASSERTIONS = (
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
)
"""Checks of the shapes and values that were traced: they hold for whole tensors alone."""


def storage_key(value: Any) -> int | None:
    """What tells the memory of a traced tensor from that of others."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:  # a tensor of vmap's
        return None


def functional_twin(target: Any) -> Any | None:
    """The operator that computes what an in-place one writes: `aten.add.Tensor` of `aten.add_.Tensor`."""
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.rstrip("_"), None)
    if packet is None or name.startswith("__") or not name.endswith("_"):
        return None
    overload = target._overloadname
    twin = getattr(packet, overload, None) if overload in packet.overloads() else None
    if twin is None:
        return None
    ours, theirs = twin._schema.arguments, target._schema.arguments
    return twin if [a.name for a in ours] == [a.name for a in theirs] else None


def tree_flatten_with_names(args: Any, kwargs: Any) -> dict[str, Any]:
    """The flattened inputs of a call by name: `args[0]`, `input_ids`, `batch['mask']`."""
    leaves = tree_flatten_with_path(args)[0]
    named = {f"args{keystr(path)}": value for path, value in leaves}
    for name, value in kwargs.items():
        named |= {f"{name}{keystr(path)}": leaf for path, leaf in tree_flatten_with_path(value)[0]}
    return named


def functional_collectives() -> Any:
    """torch's collectives as operators on plain tensors, which give their results to `wait_tensor`."""
    return torch.ops._c10d_functional


Table = dict[str, torch.Tensor | None]


def tensor_tables(module: torch.nn.Module) -> tuple[Table, Table]:
    """A module's own parameters and its own buffers, to read and to write."""
    return module._parameters, module._buffers  # type: ignore[return-value]


def put_child(parent: torch.nn.Module, name: str, child: torch.nn.Module) -> None:
    """As `add_module`, where `name` may be one that `parent` has as an attribute."""
    parent._modules[name] = child


def put_tensor(
    module: torch.nn.Module, name: str, tensor: torch.Tensor, *, persistent: bool
) -> None:
    """As `register_parameter` or `register_buffer`, where `name` may be an attribute's."""
    if isinstance(tensor, torch.nn.Parameter):
        module._parameters[name] = tensor
        return
    module._buffers[name] = tensor
    if not persistent:
        module._non_persistent_buffers_set.add(name)


def process_group(name: str) -> Any:
    """The process group that torch knows by `name`."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def local_tensor(x: Any) -> torch.Tensor:
    """The local tensor of a DTensor itself: no copy, no autograd."""
    return x._local_tensor


def spec_of(x: Any) -> Any:
    """How a DTensor is placed: mesh, placements, whole shape, strides and dtype."""
    return x._spec


def sharded_like(spec: Any, local: torch.Tensor) -> Any:
    """The DTensor of a DTensor's `_spec` that holds `local`: a tenth of the time of `from_local`."""
    return DTensor(local, copy.copy(spec), requires_grad=False)


def strided_shard(dim: int, blocks: int) -> Any:
    """DTensor's placement for a dimension cut in blocks, each split over the ranks."""
    return _StridedShard(dim, split_factor=blocks)


def serves_an_operator(function: type) -> bool:
    """Whether an `autograd.Function` is one that torch makes for an operator of `torch.library`."""
    return function.__module__.startswith("torch._library.")


@contextmanager
def quiet_export() -> Iterator[None]:
    """Keep from the user what torch warns of and prints while exporting: errors say it in our words."""
    noisy = [logging.getLogger(f"torch.{name}") for name in _NOISY]
    levels = [logger.level for logger in noisy]
    unprinted = mock.patch.object(export_trace, "print", create=True)
    with warnings.catch_warnings(), unprinted:
        warnings.simplefilter("ignore")
        for logger in noisy:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(noisy, levels, strict=True):
                logger.setLevel(level)


_NOISY = ("fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")


@contextmanager
def functions_applied_by(apply: Callable[..., Any]) -> Iterator[None]:
    """Have every `Function.apply(…)` in the block call `apply(function, plain, args, kwargs)`.

    `plain` is the Function's own apply. Names bound to `F.apply` before the block call `apply` too, so
    it is the code of the one function behind them all that is exchanged.
    """
    shared = torch.autograd.Function.apply.__func__
    code = shared.__code__

    def plain(function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            now, shared.__code__ = shared.__code__, code
            try:
                return shared(function, *args, **kwargs)
            finally:
                shared.__code__ = now

        return call

    class Hook(torch.autograd.Function):
        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any:
            _ = __class__  # the code must close over as much
            from autoshard.compat import hooked_apply

            return hooked_apply(cls, args, kwargs)

    global hooked_apply  # the exchanged code sees torch's globals, not the ones here
    before = hooked_apply
    hooked = Hook.apply.__func__.__code__
    hooked_apply = lambda function, args, kwargs: apply(function, plain(function), args, kwargs)  # noqa: E731
    shared.__code__ = hooked
    try:
        yield
    finally:
        shared.__code__ = code
        hooked_apply = before


hooked_apply: Callable[..., Any] = lambda *_: None  # noqa: E731


GRAD = "autoshard_grad"


@contextmanager
def marked_grad_mode() -> Iterator[None]:
    """Have each node that is traced in the block say in `meta[GRAD]` whether gradients were enabled.

    `torch.export` (2.13) forgets a no_grad block inside of an autocast block.
    """
    create = torch.fx.Graph.create_node

    def marked(self: torch.fx.Graph, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = create(self, *args, **kwargs)
        node.meta[GRAD] = torch.is_grad_enabled()
        return node

    with mock.patch.object(torch.fx.Graph, "create_node", marked):
        yield


def code_when_called() -> Any:
    """A block in which graph modules have their code written when they are first called.

    `torch.export` makes half a dozen of a model on its way and calls none: an eighth of its time.
    """
    return _use_lazy_graph_module(True)


@contextmanager
def no_inference_mode() -> Iterator[None]:
    """Have `torch.inference_mode()` blocks be `torch.no_grad()` ones: `torch.export` sees those alone."""
    guards: list[Any] = []

    def enter(self: Any) -> None:
        guards.append(torch.is_grad_enabled())
        torch.set_grad_enabled(not self.mode and guards[-1])

    def leave(self: Any, *raised: object) -> None:
        torch.set_grad_enabled(guards.pop())

    with (
        mock.patch.object(torch.inference_mode, "__enter__", enter),
        mock.patch.object(torch.inference_mode, "__exit__", leave),
    ):
        yield


@contextmanager
def attributes_watched(changed: Callable[[torch.nn.Module, str], Any]) -> Iterator[None]:
    """Call `changed(module, name)` for each plain attribute that a module has changed by the end of its export.

    `torch.export` puts attributes back itself, so that nothing is to be seen of it afterwards.
    """
    original = export_trace._detect_attribute_assignment  # type: ignore[reportPrivateImportUsage]

    def plain(module: torch.nn.Module) -> dict[str, Any]:
        return {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}

    @contextmanager
    def watched(root: torch.nn.Module) -> Iterator[None]:
        with original(root):
            before = [(module, plain(module)) for module in root.modules()]
            yield
            for module, kept in before:
                for name, value in plain(module).items():
                    if name in kept and kept[name] != value:
                        changed(module, name)

    with mock.patch.object(export_trace, "_detect_attribute_assignment", watched):
        yield


def schema_arguments(target: Any) -> list[Any]:
    """An operator's arguments, as its schema has them."""
    return _arguments(target)


def transformers_export_patches(model: Any) -> list[Any]:
    """What transformers (5.24) changes in its models to export them; its cache classes are registered."""
    try:
        from transformers.exporters import exporter_dynamo, utils
    except ImportError:
        return []
    if hasattr(model, "config"):
        exporter_dynamo.register_cache_pytrees_for_model(model)
    patches = []
    for path, attribute, factory in utils._PATCHES.get("dynamo", ()):
        module = path
        while module and module not in sys.modules:
            module = module.rpartition(".")[0]
        if module.startswith("transformers.models."):
            owner = utils.import_dotted_path(path, missing_ok=True)
            if owner is not None:
                patches.append(utils.patch_attribute(owner, attribute, factory))
    return patches
