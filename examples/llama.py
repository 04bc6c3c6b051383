"""Llamas of two sizes, with example inputs: what the other examples plan, verify and train.

Each function is a SOURCE of the command line, too:

    autoshard plan examples/llama.py:llama_8b --world-size 8
    autoshard verify examples/llama.py:factory --world-size 4 --hardware ideal
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

Example = tuple[LlamaForCausalLM, tuple[()], dict[str, torch.Tensor]]


def factory() -> Example:
    """A Llama of 3 million parameters, with weights and data of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        **COMMON,
    )
    return LlamaForCausalLM(config), (), batch(0)


def llama_8b() -> Example:
    """Llama 3 8B on the meta device: shapes without values, so nothing is allocated."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        dtype=torch.bfloat16,
        **COMMON,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
        ids = torch.zeros(4, 2048, dtype=torch.long)
    return model, (), {"input_ids": ids, "labels": ids}


def batch(step: int, size: int = 4, length: int = 64, vocabulary: int = 32) -> dict[str, Any]:
    """Sequences to learn: each token follows from the one before it, x → 3x + 1.

    The same on every rank, as tensor parallelism asks.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(vocabulary, (size,), generator=generator)]
    for _ in range(length - 1):
        tokens.append((3 * tokens[-1] + 1) % vocabulary)
    ids = torch.stack(tokens, dim=1)
    return {"input_ids": ids, "labels": ids.clone()}


COMMON: dict[str, Any] = {
    "use_cache": False,  # a model that trains returns no cache
    "loss_type": "ForCausalLM",
}
