"""Time to plan a Llama-3-8B on the meta device, beside the time of `torch.export` alone.

`python benchmarks/planning.py --help` for the options.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autoshard


@dataclass(frozen=True)
class Settings:
    """The model's depth, what it is planned for, and the two depths between which growth is measured."""

    layers: int = 32
    ranks: int = 8
    hardware: str = "h100-sxm"
    search: str = "tensor"
    rounds: int = 3
    few: int = 8
    many: int = 80


def build(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """Llama-3-8B's shapes, in bfloat16, with a batch of 4 × 2048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(4, 2048, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def export_s(model: nn.Module, kwargs: dict[str, Any]) -> float:
    """The time of torch.export by itself."""
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.export(model, (), kwargs, strict=False)
    return time.perf_counter() - started


def plan_s(model: nn.Module, kwargs: dict[str, Any], settings: Settings) -> tuple[float, float]:
    """The time of autoshard.plan, and of what comes after capture in it."""
    stages: list[tuple[str, float]] = []
    started = time.perf_counter()
    autoshard.plan(
        model,
        settings.ranks,
        kwargs=kwargs,
        hardware=settings.hardware,
        search=settings.search,
        progress=lambda stage: stages.append((stage, time.perf_counter())),
    )
    done = time.perf_counter()
    captured = next(at for stage, at in stages if stage != "capture")
    return done - started, done - captured


def run(settings: Settings) -> dict[str, float]:
    """Interleaved rounds of both at one depth, and the time beyond capture at two more; medians."""
    plan_s(*build(1), settings)  # imports and caches
    model, kwargs = build(settings.layers)
    pairs = [
        (export_s(model, kwargs), *plan_s(model, kwargs, settings)) for _ in range(settings.rounds)
    ]
    exported, planned, beyond = map(statistics.median, zip(*pairs, strict=True))
    few, many = build(settings.few), build(settings.many)
    grown = [
        (plan_s(*few, settings)[1], plan_s(*many, settings)[1]) for _ in range(settings.rounds)
    ]
    before, after = map(statistics.median, zip(*grown, strict=True))
    return {
        "export_s": exported,
        "plan_s": planned,
        "beyond_capture_s": beyond,
        "plan_over_export": planned / exported,
        "few_beyond_capture_s": before,
        "many_beyond_capture_s": after,
        "growth": after / before,
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in Settings().__dict__.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    print(json.dumps(run(Settings(**vars(parser.parse_args()))), indent=2))


if __name__ == "__main__":
    main()
