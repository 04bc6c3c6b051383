"""Eight models, sharded on two and four ranks, compute and train as they do unsharded."""

from __future__ import annotations

import pytest
from models import MODELS, mlp
from oracle import assert_sound, split_share

import autoshard

# These cast logits or norms to float32 whatever their weights are.
CASTS = {"llama", "gpt2", "t5"}
EVERY_SETTING = [
    ("ideal", "tensor"),
    ("ideal", "all"),
    ("h100-sxm", "tensor"),
    ("h100-sxm", "all"),
]


def bound(name: str) -> float:
    return 1e-6 if name in CASTS else 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_verified(name: str, ranks: int) -> None:
    for hardware, search in EVERY_SETTING:
        model, kwargs = MODELS[name]()
        found = autoshard.verify(model, ranks, (), kwargs, hardware=hardware, search=search)
        assert found.ok, f"{hardware}, {search}: {found.first_divergence}"
        worst = max(found.max_output_error, found.max_gradient_error, found.max_update_error)
        assert worst < bound(name), f"{hardware}, {search}"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_unsharded(name: str, ranks: int) -> None:
    for search in ("tensor", "all"):
        model, kwargs = MODELS[name]()
        sharded = assert_sound(
            model, (), kwargs, ranks, bound(name), hardware="ideal", search=search
        )
        assert split_share(sharded.plan) >= 0.9, search


def test_mlp_trains_as_unsharded() -> None:
    for search in ("tensor", "all"):
        model, kwargs = mlp()
        sharded = assert_sound(model, (), kwargs, 2, hardware="ideal", search=search)
        assert split_share(sharded.plan) >= 0.9
