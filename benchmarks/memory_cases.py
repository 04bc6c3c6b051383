"""The models whose predicted memory is held to measured memory; see `memory.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cost_cases
import torch
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]


def _ids(batch: int, sequence: int, vocabulary: int = 1024) -> torch.Tensor:
    return torch.randint(1, vocabulary, (batch, sequence))


def t5() -> Built:
    """An encoder, a decoder, and relative positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=1024,
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=3,
        num_heads=8,
        dropout_rate=0.0,
    )
    config.use_cache, config.decoder_start_token_id = False, 0
    ids = _ids(4, 64)
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids.clone()}


def resnet() -> Built:
    """Convolutions and batch norms."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128], depths=[2, 2], layer_type="basic", num_labels=16
    )
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(16, (8,))
    return ResNetForImageClassification(config), {"pixel_values": images, "labels": labels}


def mixtral() -> Built:
    """A mixture of experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
        vocab_size=1024,
    )
    ids = _ids(4, 64)
    return MixtralForCausalLM(config), {
        "input_ids": ids,
        "labels": ids.clone(),
        "use_cache": False,
    }


def unet() -> Built:
    """A diffusion model: group norms, attention over space, skips."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model, {"sample": torch.randn(4, 4, 16, 16), "timestep": torch.tensor([3, 5, 7, 9])}


MODELS: dict[str, Callable[[], Built]] = {
    "mlp": cost_cases.mlp,
    "convnet": cost_cases.convnet,
    "llama": cost_cases.llama,
    "gpt2": cost_cases.gpt2,
    "bert": cost_cases.bert,
    "vit": cost_cases.vit,
    "t5": t5,
    "resnet": resnet,
    "mixtral": mixtral,
    "unet": unet,
}
PLANS = {"fastest": ("cpu-gloo", "tensor"), "tensor": ("ideal", "tensor"), "all": ("ideal", "all")}
"""Name → the hardware and the search."""


def built(name: str) -> Built:
    """A model in train mode, without dropout, and its inputs; the same on every rank."""
    torch.manual_seed(0)
    model, kwargs = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train(), kwargs
