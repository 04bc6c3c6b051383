"""Adapters by peft: sharded equals unsharded, and frozen weights are split too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import gpt2, llama
from oracle import IDEAL_ALL, IDEAL_TENSOR, assert_sound, split_share
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (llama, {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 3}),
    "fused": (gpt2, {"target_modules": ["c_attn", "c_proj"], "r": 4, "fan_in_fan_out": True}),
    "dora": (llama, {"target_modules": "all-linear", "r": 2, "use_dora": True}),
    "saved": (llama, {"target_modules": ["q_proj"], "r": 2, "modules_to_save": ["lm_head"]}),
}


def _norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.variance_epsilon)


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, IDEAL_TENSOR), (3, IDEAL_ALL)], ids=["2-tensor", "3-all"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters(
    kind: str, ranks: int, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what transformers computes in float32 (norms, the loss), so that the bound is float64's."""
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", _norm)
    torch.manual_seed(0)
    build, config = KINDS[kind]
    model, kwargs = build(layers=1)
    del kwargs["labels"]
    given = {"lora_alpha": 8, "lora_dropout": 0.0, "init_lora_weights": False, **config}
    model = peft.get_peft_model(model, peft.LoraConfig(**given))
    sharded = assert_sound(model, (), kwargs, ranks, **options)
    assert split_share(sharded.plan) > 0.9
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sharded.plan.cost.memory.gradients_bytes <= 8 * trained
