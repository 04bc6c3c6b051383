"""Saved on two ranks, training goes on at another world size: weights, and the optimizer's state with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pitfall_models as models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from oracle import IDEAL_TENSOR, placements
from processes import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import autoshard
from autoshard import ShardedModule

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

FULL = StateDictOptions(full_state_dict=True)
BOUND = 1e-8
"""AdamW makes steps of rounding noise where a gradient is zero: of a key's bias under softmax."""

IN_BLOCKS: dict[str, str] = {}
"""The fused weight is cut in three blocks: strided shards."""
IN_SLICES = {"attention.qkv.*": "replicated"}
"""Every weight is whole or a slice."""


def built() -> nn.Module:
    torch.manual_seed(0)
    return models.TwoBranches().double()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def sharded(asked: Mapping[str, str]) -> tuple[ShardedModule, torch.optim.Optimizer]:
    x = torch.zeros(2, 5, 24, dtype=torch.float64)
    found = autoshard.autoshard(
        built(), dist.get_world_size(), (x,), constraints=asked, **IDEAL_TENSOR
    )
    return found, torch.optim.AdamW(found.parameters(), 1e-2)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def save(folder: str, asked: Mapping[str, str]) -> None:
    """Two steps, then all that a checkpoint needs: whole tensors in one file, or slices by all ranks."""
    model, optimizer = sharded(asked)
    assert (placements(model.plan)["attention.qkv.weight"] == "S(0,3)") == (asked == IN_BLOCKS)
    trained(model, optimizer, 2)
    states = get_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        torch.save(states, f"{folder}/whole.pt")
    if asked == IN_SLICES:
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)  # fmt: skip


def resume(folder: str, asked: Mapping[str, str], how: str) -> float:
    """A third step; how far its parameters are from those of three steps of the unsharded model."""
    model, optimizer = sharded(asked)
    if how == "whole":
        weights, state = torch.load(f"{folder}/whole.pt")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=FULL)  # fmt: skip
    else:
        names = ("model", "optimizer")
        states = dict(zip(names, get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])  # fmt: skip
    reference = built()
    trained(reference, torch.optim.AdamW(reference.parameters(), 1e-2), 3)
    trained(model, optimizer, 1)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((whole(a.detach()) - b.detach()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("asked", "how"), [(IN_BLOCKS, "whole"), (IN_SLICES, "whole"), (IN_SLICES, "slices")],
    ids=["strided shards, whole", "shards, whole", "shards, slices"],
)  # fmt: skip
def test_saved_on_2_ranks_and_resumed_on_2_4_and_1_with_the_optimizers_state(
    asked: Mapping[str, str], how: str, tmp_path: Path
) -> None:
    run_ranks(save, 2, str(tmp_path), asked)
    for size in (2, 4, 1):
        for off in run_ranks(resume, size, str(tmp_path), asked, how):
            assert off < BOUND, size


def refused(folder: str) -> str:
    model, _ = sharded(IN_BLOCKS)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(model.state_dict(), checkpoint_id=folder)
    return str(caught.value)


def test_slices_of_a_strided_shard_are_refused_and_never_saved_wrong(tmp_path: Path) -> None:
    for text in run_ranks(refused, 2, str(tmp_path)):
        assert "overlapping chunks" in text


def to_safetensors(folder: str) -> None:
    """Of the whole state dict; one file holds both names of a tied weight."""
    torch.manual_seed(0)
    model, ids = models.TiedHead(), torch.randint(0, 24, (2, 6))
    found = autoshard.autoshard(model, dist.get_world_size(), (ids,), **IDEAL_TENSOR)
    state = found.full_state_dict()
    if dist.get_rank() == 0:
        save_file(state, f"{folder}/whole.safetensors")
    dist.barrier()
    loaded = load_file(f"{folder}/whole.safetensors")
    assert list(state) == list(model.state_dict())
    for name, wanted in model.state_dict().items():
        assert torch.equal(loaded[name], wanted), name
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.zero_()
    found.load_state_dict(loaded)
    for name, value in found.full_state_dict().items():
        assert torch.equal(value, loaded[name]), name
    assert found.head.weight is found.emb.weight


@pytest.mark.parametrize("size", [2, 4])
def test_safetensors_of_a_state_dict_and_back_into_a_sharded_model(
    size: int, tmp_path: Path
) -> None:
    run_ranks(to_safetensors, size, str(tmp_path))
