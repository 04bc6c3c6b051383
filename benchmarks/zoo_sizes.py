"""Make the default configuration of any architecture tiny: every number, by what its name says it is.

A configuration is a tree of names and values (`transformers`: `config.to_dict()`; `diffusers`: the defaults of a
constructor). What a name stands for, its role, gives its size. A rule for a name holds for hundreds of models, and not
for all: the builder (`zoo_models`) gives a role another size where a model refuses the first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Role:
    """Numbers whose name matches `pattern` are at most `size`; in a list, the `scale` from stage to stage is kept."""

    name: str
    pattern: re.Pattern[str]
    size: int
    scale: bool = False


def _role(name: str, size: int, *patterns: str, scale: bool = False) -> Role:
    return Role(name, re.compile("|".join(f"(?:{p})" for p in patterns)), size, scale)


WORDS = 128
"""The size of a vocabulary. Special tokens lie in its upper half, sentences in the lower."""

ROLES = (
    _role("vocabulary", WORDS, r"vocab_size", r"codebook_size$", r"^num_embeddings$", r"_vocab$", r"^n_words$"),
    _role("positions", 64, r"max_.*positions?(_embeddings)?$", r"^n_positions$", r"^n_ctx$", r"max_seq", r"^seq_length$", r"max_length$", r"context_length$", r"sample_frames$"),
    _role("experts a token", 2, r"experts_per_tok", r"top_?k", r"num_selected_experts", r"^moe_k$"),
    _role("expert groups", 1, r"^n_group$", r"expert_groups?$"),
    _role("experts", 4, r"experts?$"),
    _role("layers", 2, r"layers?(_per_.*)?$", r"depths?$", r"_blocks$", r"^n_layers?$", r"num_stages_per"),
    _role("key and value heads", 2, r"(key_value|kv|query)_(heads|groups)$"),
    _role("state heads", 8, r"mamba_(n|num)_heads$"),
    _role("heads", 4, r"heads?$"),
    _role("rotary width", 8, r"rope_head_dim$", r"rotary_dim$"),
    _role("head width", 16, r"head_dim$", r"d_kv$", r"head_size$", r"_d_head$", r"kv_channels$", r"(query|key|value)_dim$", r"head_width$"),
    _role("rank", 16, r"lora_rank$", r"lora_dim$"),
    _role("time step rank", 8, r"time_step_rank$", r"dt_rank$"),
    _role("states", 8, r"state_(size|dim)$", r"d_state$"),
    _role("inner width", 128, r"intermediate", r"ffn?_(dim|hidden|size)", r"^d_ff$", r"^n_inner$", r"mlp_(dim|hidden|size)", r"feed_?forward.*(dim|size)"),
    _role("width", 64, r"hidden_(size|dim|channels)s?$", r"d_model$", r"n_embd$", r"embed(ding)?_(dim|size|channels)s?$", r"proj(ection)?(or)?_(dim|size|hidden_size)$", r"^(dim|width|channels|output_dim|inner_dim)$", r"_width$", r"^(?!(in|out|num|audio|latent|input|num_input)_channels$).*_channels$", r"cross_attention_dim$", r"caption_channels$", r"embed_channels$", r"^emb_dim$", r"d_ssm$", r"(text|time|joint|pooled|caption).*_dim$", scale=True),
    _role("image", 32, r"image_size$", r"img_size$", r"^input_size$", r"^crop_size$", r"sample_(size|width|height)$"),
    _role("patch", 8, r"patch_size$"),
    _role("norm groups", 8, r"num_groups$"),
    _role("frames", 4, r"num_frames$", r"frames_per_clip$"),
    _role("mel bins", 32, r"mels?$", r"mel_bins$"),
    _role("chunk", 8, r"chunk_size$", r"window(_size)?$"),
    _role("queries", 8, r"queries$", r"query_tokens$", r"latents$", r"query_length$"),
    _role("codebooks", 2, r"codebooks$", r"quantizers$"),
)  # fmt: skip

_ROTARY_SECTIONS = [2, 3, 3]
"""Of time, height and width: half of a head width of 16."""
_TOKEN = re.compile(r"_(token_id|token_index|token_ids)$|^image_token_index$")
_LAYERS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|num_decoder_layers)$")


def shrunk(tree: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The configuration with every number shrunk, to `sizes` where that has the role's name.

    A list with one entry for each layer is cut to as many layers as are left.
    """
    layers = {v for k, v in tree.items() if _LAYERS.search(k) and isinstance(v, int)}
    small = {name: _small(name, value, sizes) for name, value in tree.items()}
    left = max((v for k, v in small.items() if _LAYERS.search(k) and isinstance(v, int)), default=0)
    return {
        name: value[:left] if left and isinstance(value, list) and len(value) in layers else value
        for name, value in small.items()
    }


def _small(name: str, value: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(value, Mapping):
        return shrunk(value, sizes) if all(isinstance(k, str) for k in value) else value
    if name == "mrope_section":
        return _ROTARY_SECTIONS
    if isinstance(value, list | tuple) and value and all(type(x) is int for x in value):
        role = _role_of(name, sizes)
        return type(value)(_scaled(value, role)) if role else value
    if type(value) is not int:
        return value
    if _TOKEN.search(name):
        return value if value < WORDS // 2 else WORDS // 2 + sum(map(ord, name)) % (WORDS // 2)
    role = _role_of(name, sizes)
    return min(value, role.size) if role else value


def _scaled(values: list[int] | tuple[int, ...], role: Role) -> list[int]:
    if not role.scale:
        most = {"layers": 1, "heads": 2}.get(role.name, role.size)
        return [min(v, most) for v in values]
    least = max(1, min(values))
    return [min(role.size, 16 * max(1, round(v / least))) for v in values]


def _role_of(name: str, sizes: Mapping[str, int]) -> Role | None:
    role = next((r for r in ROLES if r.pattern.search(name)), None)
    return role and replace(role, size=sizes.get(role.name, role.size))
