"""Small models with example inputs, shared by the tests: every builder returns ``(model, kwargs)``.

Each is seeded, so two calls build equal models, and each has its dropout off, so that a sharded run can be
compared with the unsharded one number by number. ``MODELS`` holds them by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Any]]


class Mlp(nn.Module):
    """Linear layers with biases, an activation of each kind and a LayerNorm in the middle."""

    def __init__(self, width: int = 32, hidden: int = 64, classes: int = 8):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.LayerNorm(hidden),
            nn.Linear(hidden, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def mlp() -> Built:
    torch.manual_seed(0)
    return Mlp(), {"x": torch.randn(8, 32)}


def _ids(batch: int = 4, sequence: int = 16, vocabulary: int = 128) -> Tensor:
    return torch.randint(1, vocabulary, (batch, sequence))


def llama(
    layers: int = 2, heads: int = 4, kv_heads: int = 2, hidden: int = 64, vocabulary: int = 128
) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
    )
    ids = _ids(vocabulary=vocabulary)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def gpt2(layers: int = 2, heads: int = 4, vocabulary: int = 128, dropout: float = 0.0) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=64,
        n_layer=layers,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    ids = _ids(vocabulary=vocabulary)
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = _ids()
    return BertForMaskedLM(config), {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.clone(),
    }


def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 32, 32),
        "labels": torch.arange(4),
    }


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        vocab_size=128,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    ids = _ids()
    return T5ForConditionalGeneration(config), {
        "input_ids": ids,
        "labels": ids[:, :8].clone(),
        "use_cache": False,
    }


def encoder_layer() -> Built:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), {
        "src": torch.randn(4, 16, 64)
    }


def resnet() -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=8
    )
    return ResNetForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 32, 32),
        "labels": torch.arange(4),
    }


MODELS: dict[str, Callable[[], Built]] = {
    "mlp": mlp,
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "encoder_layer": encoder_layer,
    "resnet": resnet,
}


def llama_8b(layers: int = 2, batch: int = 4, sequence: int = 2048) -> Built:
    """Llama-3-8B's shapes on the meta device, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(batch, sequence, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def to_double(built: Built) -> Built:
    """The same model and inputs in float64."""
    model, kwargs = built
    cast = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in kwargs.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.double(), cast
