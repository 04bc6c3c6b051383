"""Leave dropout's masks out of a graph, so that a sharded program can be compared with the whole.

A split tensor is dropped by masks of each rank's own: its values differ from the unsharded model's, as they
would under another seed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from autoshard.runtime.operators import is_ours

aten = torch.ops.aten

_PROBABILITY: dict[Any, tuple[int, str]] = {
    aten.dropout.default: (1, "p"),
    aten.native_dropout.default: (1, "p"),
    aten.feature_dropout.default: (1, "p"),
    aten.alpha_dropout.default: (1, "p"),
    aten.feature_alpha_dropout.default: (1, "p"),
    aten.scaled_dot_product_attention.default: (4, "dropout_p"),
    aten.lstm.input: (5, "dropout"),
    aten.gru.input: (5, "dropout"),
    aten.rnn_tanh.input: (5, "dropout"),
    aten.rnn_relu.input: (5, "dropout"),
}
_TRAIN: dict[Any, int | None] = {aten.scaled_dot_product_attention.default: None, aten.lstm.input: 6, aten.gru.input: 6,
          aten.rnn_tanh.input: 6, aten.rnn_relu.input: 6}  # fmt: skip


def has_masks(graph: Graph) -> bool:
    """Whether some operator of the graph drops at random."""
    return any(map(_drops, graph.nodes))


def draws(graph: Graph) -> bool:
    """Whether some operator of the graph draws random numbers."""
    return any(_drops(node) or _is_random(node) for node in graph.nodes)


def _is_random(node: Node) -> bool:
    """Whether a node draws whatever its arguments: `rand_like`, `bernoulli`, `multinomial`, …"""
    target: Any = node.target
    tagged = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return tagged and target not in _PROBABILITY and target.namespace == "aten"


def leave_out_masks(graph: Graph) -> None:
    """Let no operator of the graph drop; its nodes stay."""
    for node in graph.nodes:
        if is_ours(node.target):
            _plain(node)
        if _drops(node):
            index, name = _PROBABILITY[node.target]
            if index < len(node.args):
                node.update_arg(index, 0.0)
            else:
                node.update_kwarg(name, 0.0)


def _drops(node: Node) -> bool:
    target: Any = node.target
    if target not in _PROBABILITY:
        return False
    index, name = _PROBABILITY[target]
    at = _TRAIN.get(target, 2)
    trains = at is None or at >= len(node.args) or bool(node.args[at])
    probability = node.args[index] if index < len(node.args) else node.kwargs.get(name, 0.0)
    return trains and bool(probability)


def _plain(node: Node) -> None:
    """A lowering that drops becomes the operator it stands for."""
    name = node.target.__name__.partition(".")[0]  # type: ignore[union-attr]
    if name == "split_dropout":
        node.target, node.args = aten.dropout.default, (node.args[0], 0.0, True)
    elif name == "causal_queries":
        node.update_arg(3, 0.0)
    elif name == "grouped_queries":
        node.update_arg(4, 0.0)
    elif name == "split_attention":
        q, k, v, mask, _, is_causal, scale, grouped, *_ = node.args
        node.target = aten.scaled_dot_product_attention.default
        node.args = (q, k, v, mask, 0.0, is_causal)
        node.kwargs = {"scale": scale, "enable_gqa": grouped}
