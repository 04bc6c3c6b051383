"""What a capture leaves: the graph as data, and the torch objects it stands for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoshard.compat import TreeSpec
from autoshard.graph import OpGraph, Ref


@dataclass(frozen=True)
class Captured:
    """A model captured for one set of input shapes, in one mode.

    Attributes:
        graph: the model as data.
        fx_graph: the same as a `torch.fx.Graph`, whose nodes have the names of the graph's ops.
        tensors: parameters, buffers and constants, by op name; parameters are the model's own.
        inputs: op names of the tensor inputs, and the values of the others, flattened in order.
        in_spec, out_spec: how (args, kwargs) and the result are flattened.
        outputs: the flattened result: a `Ref` for a tensor, the value itself for anything else.
        training: the mode that was captured.
        transient: FQNs of the buffers that are no part of the state dict.
        notes: sentences on what the program leaves out of the model.
    """

    graph: OpGraph
    fx_graph: torch.fx.Graph
    tensors: dict[str, torch.Tensor]
    inputs: tuple[tuple[str, object], ...]
    in_spec: TreeSpec
    out_spec: TreeSpec
    outputs: tuple[Ref | object, ...]
    training: bool
    transient: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
