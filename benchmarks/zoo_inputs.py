"""Example inputs of a model, from the names of its forward's parameters and from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from zoo_sizes import WORDS

BATCH, TOKENS, DECODED, FRAMES = 2, 12, 8, 64


@dataclass(frozen=True)
class Facts:
    """What inputs are made from."""

    model: nn.Module
    config: Any
    task: str
    random: torch.Generator

    def number(self, *names: str, default: int = 0) -> int:
        """The first of `names` that is a number (of a pair, the first) in the configuration or in a part of it."""
        for name in names:
            for part in self.parts():
                value = part.get(name) if isinstance(part, dict) else getattr(part, name, None)
                value = value[0] if isinstance(value, list | tuple) and value else value
                if type(value) is int:
                    return value
        return default

    def parts(self) -> list[Any]:
        """The configuration, then those within it."""
        inner = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "backbone_config", "encoder_config")  # fmt: skip
        found = [getattr(self.config, n, None) for n in inner if not isinstance(self.config, dict)]
        return [self.config, *(part for part in found if part is not None)]

    def normal(self, *shape: int) -> Tensor:
        """Numbers drawn from a normal distribution."""
        return torch.randn(*shape, generator=self.random)

    def below(self, bound: int, *shape: int) -> Tensor:
        """Integers from zero to below `bound`."""
        return torch.randint(0, max(1, bound), shape, generator=self.random)


def _words(f: Facts, length: int) -> Tensor:
    """No special tokens: those are put into the upper half of the vocabulary, or are the first few."""
    words = min(f.number("vocab_size", default=WORDS), WORDS // 2)
    return 4 + f.below(words - 4, BATCH, length)


def _image(f: Facts) -> Tensor:
    size = min(256, f.number("image_size", "img_size", "input_size", default=32))
    return f.normal(
        BATCH, f.number("num_channels", "in_channels", "in_chans", default=3), size, size
    )


def _video(f: Facts) -> Tensor:
    image = _image(f)
    frames = f.number("num_frames", "frames_per_clip", default=4)
    return f.normal(BATCH, frames, *image.shape[1:])


def _pixels(f: Facts) -> Tensor:
    videos = "video" in f.task or type(f.model).__name__.startswith(
        ("Timesformer", "Vivit", "Video")
    )
    return _video(f) if videos else _image(f)


def _wave(f: Facts) -> Tensor:
    if f.number("max_length") and f.number("num_mel_bins"):
        return f.normal(BATCH, f.number("max_length"), f.number("num_mel_bins"))
    if f.number("audio_channels"):
        return f.normal(BATCH, f.number("audio_channels"), 1920)
    return f.normal(BATCH, 3200)


def _spectrogram(f: Facts) -> Tensor:
    bins = f.number("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", default=80)
    if "Whisper" in type(f.model).__name__ or f.number("max_source_positions") == 64:
        return f.normal(BATCH, bins, 2 * f.number("max_source_positions", default=64))
    return f.normal(BATCH, FRAMES, bins)


def _boxes(f: Facts) -> Tensor:
    return f.below(16, BATCH, TOKENS, 4).sort(-1).values


def _labels(f: Facts) -> Tensor:
    if f.task in ("causal language model", "masked language model"):
        return _words(f, TOKENS)
    if f.task in ("sequence to sequence", "speech to text"):
        return _words(f, DECODED)
    return f.below(2, BATCH)


def _history(f: Facts) -> Tensor:
    channels = f.number("num_input_channels", "input_size", default=1)
    return f.normal(BATCH, f.number("context_length", default=16), channels)


def _latent(f: Facts) -> Tensor:
    """What a diffusion model denoises: (batch, channels, [frames,] height, width) or (batch, positions, channels)."""
    channels = f.number("in_channels", "in_chans", "latent_channels", default=3)
    shapes = {"video": (channels, 5, 16, 16), "sequence": (16, channels)}
    return f.normal(BATCH, *shapes.get(f.task, (channels, 16, 16)))


MAKERS: dict[str, Callable[[Facts], Any]] = {
    "input_ids": lambda f: _words(f, TOKENS),
    "decoder_input_ids": lambda f: _words(f, DECODED),
    "pixel_values": _pixels,
    "pixel_values_videos": _video,
    "input_values": _wave,
    "input_features": _spectrogram,
    "past_values": _history,
    "bbox": _boxes,
    "labels": _labels,
    "inputs_embeds": lambda f: f.normal(BATCH, TOKENS, f.number("hidden_size", default=64)),
    "encoder_hidden_states": lambda f: f.normal(BATCH, 8, f.number("cross_attention_dim", "joint_attention_dim", "caption_channels", "text_embed_dim", "text_dim", "hidden_size", default=64)),
    "encoder_attention_mask": lambda f: torch.ones(BATCH, 8, dtype=torch.long),
    "pooled_projections": lambda f: f.normal(BATCH, f.number("pooled_projection_dim", "text_embed_2_dim", default=64)),
    "timestep": lambda f: torch.tensor([3, 7]),
    "timesteps": lambda f: torch.tensor([3, 7]),
    "class_labels": lambda f: torch.tensor([1, 2]),
    "sample": _latent,
    "hidden_states": _latent,
    "x": _latent,
    "img_ids": lambda f: torch.zeros(16, 3),
    "txt_ids": lambda f: torch.zeros(8, 3),
    "added_cond_kwargs": lambda f: {"resolution": None, "aspect_ratio": None},
    "added_time_ids": lambda f: f.normal(BATCH, 3),
    "encoder_hidden_states_mask": lambda f: torch.ones(BATCH, 8, dtype=torch.bool),
    "pixel_attention_mask": lambda f: torch.ones(BATCH, 8, dtype=torch.bool),
    "query_embeds": lambda f: f.normal(BATCH, 8, f.number("hidden_size", default=64)),
    "return_dict": lambda f: False,
    "use_cache": lambda f: False,
}  # fmt: skip
LABELLED = {"causal language model", "masked language model", "sequence to sequence", "speech to text", "images to classes", "audio to classes", "video to classes", "text to classes"}  # fmt: skip


def _wants(name: str, config: Any) -> bool:
    """Whether a diffusion model that may be called without this input must in fact be given it."""
    dims = {"class_labels": "num_embeds_ada_norm", "added_cond_kwargs": "use_additional_conditions"}
    known = dict(config) if isinstance(config, dict) else vars(config)
    return bool(known.get(dims[name])) if name in dims else True


def example(model: nn.Module, config: Any, task: str, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments for `model`'s forward: those it must have, the main one, and what a training step gives.

    Raises:
        LookupError: an input that the model must have, and that this file doesn't know.
    """
    facts = Facts(model, config, task, torch.Generator().manual_seed(seed))
    taken = inspect.signature(model.forward).parameters
    names = [
        n for n, p in taken.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    main = getattr(model, "main_input_name", None)
    if main in taken and main not in names:
        names.append(main)
    if (
        "language" in task
        and "input_ids" in taken
        and not {"input_ids", "input_features"} & set(names)
    ):
        names = ["input_ids"]
    if {"pixel_values", "input_ids"} <= set(taken) and task == "base":
        # Images that are put in place of tokens of the text are left out: that is data-dependent.
        merged = any("image_token" in n for n in vars(config))
        names = [n for n in names if n != "pixel_values"] if merged else names
        names += [
            n
            for n in ("pixel_values", "input_ids")
            if n not in names and not (merged and n == "pixel_values")
        ]
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        names.append("decoder_input_ids")
    always = (
        "bbox",
        "use_cache",
        "return_dict" if task in ("image", "video", "sequence") else "use_cache",
    )
    names += [n for n in always if n in taken and n not in names]
    optional = (
        "class_labels",
        "added_cond_kwargs",
        "pooled_projections",
        "img_ids",
        "txt_ids",
        "timestep",
        "encoder_hidden_states",
    )
    names += [
        n
        for n in optional
        if n in taken
        and n not in names
        and task in ("image", "video", "sequence")
        and _wants(n, config)
    ]
    if task in LABELLED and "labels" in taken:
        names.append("labels")
    unknown = sorted(set(names) - set(MAKERS))
    if unknown:
        raise LookupError(f"inputs that the zoo cannot make: {', '.join(unknown)}")
    return {name: MAKERS[name](facts) for name in dict.fromkeys(names)}
