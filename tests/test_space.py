"""Convolutions and pooling with space split: the ranks exchange the edges of their slices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import IDEAL_ALL, IDEAL_TENSOR, assert_sound
from processes import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard


class Net(nn.Module):
    """One image of one channel: strides, dilation, norms, pooling, stretching, and a way up again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 1, 7, 2, 3)
        self.norm = nn.BatchNorm2d(1)
        self.wide = nn.Conv2d(1, 1, 3, padding=2, dilation=2)
        self.down = nn.Conv2d(1, 1, 2, 2)
        self.group = nn.GroupNorm(1, 1)
        self.up = nn.ConvTranspose2d(1, 1, 4, 2, 1)
        self.last = nn.Conv2d(1, 1, 3, padding="same")
        self.head = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 1, 1)
        y = self.up(F.gelu(self.group(self.down(self.wide(x)))))
        z = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0)
        return self.head(F.adaptive_avg_pool2d(self.last(y + z), 1).flatten(1))


def exchanges(plan: autoshard.Plan) -> list[str]:
    """The operators that exchange edges."""
    found = [c.key for c in plan.choices if "[halo_" in c.strategy]
    return sorted({key.rpartition("/")[2].partition("#")[0] for key in found})


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


EVERY = [
    "aten.avg_pool2d.default",
    "aten.conv2d.default",
    "aten.conv2d.padding",
    "aten.conv_transpose2d.input",
    "aten.max_pool2d.default",
]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [(48, 16), (40, 8), (56, 24)])
def test_one_image_is_split_by_rows(size: tuple[int, int], ranks: int) -> None:
    """On 3 ranks slices have different sizes; what cannot be cut so is gathered in between."""
    sharded = assert_sound(Net(), (torch.randn(1, 1, *size),), ranks=ranks, **IDEAL_ALL)
    if size[0] % (4 * ranks) == 0:
        assert exchanges(sharded.plan) == EVERY
    else:
        assert exchanges(sharded.plan)


def test_space_is_data() -> None:
    plan = autoshard.plan(Net(), 2, (torch.randn(1, 1, 48, 16),), **IDEAL_TENSOR)
    assert exchanges(plan) == []


def test_a_sequence_of_odd_length() -> None:
    """Windows without padding: slices of what is read and of what is made do not meet."""
    net = nn.Sequential(nn.Conv1d(1, 1, 5), nn.GELU(), nn.Conv1d(1, 1, 3, 2), nn.MaxPool1d(3, 2))
    for ranks, length in ((2, 37), (3, 38), (4, 61), (5, 103)):
        sharded = assert_sound(net, (torch.randn(1, 1, length),), ranks=ranks, **IDEAL_ALL)
        assert exchanges(sharded.plan), (ranks, length)


def test_large_images_are_split_by_rows_on_real_hardware() -> None:
    """A picture too large for one rank's patience: edges travel, channels and weights stay whole."""
    with torch.device("meta"):
        net = nn.Sequential(*[nn.Conv2d(64, 64, 3, padding=1) for _ in range(4)])
        x = torch.empty(1, 64, 2048, 2048)
    plan = autoshard.plan(net, 8, (x,), hardware="h100-sxm", search="all")
    assert exchanges(plan) == ["aten.conv2d.default"]
    edges = [c for c in plan.collectives if "edges" in c.reason]
    assert {(c.kind, c.phase) for c in edges} == {
        ("all_gather", "forward"),
        ("reduce_scatter", "backward"),
    }
    assert {c.bytes for c in edges} == {64 * 2 * 2048 * 4 * 8}


def two_ranks() -> Any:
    net, x = Net().double(), torch.randn(1, 1, 48, 16, dtype=torch.float64)
    sharded = autoshard.autoshard(copy.deepcopy(net), 2, (x,), **IDEAL_ALL)
    wanted, found = net(x), sharded(x)
    for out in (wanted, found):
        out.sum().backward()
    torch.testing.assert_close(found, wanted)
    ours = dict(sharded.named_parameters())
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(ours[name].grad.full_tensor(), parameter.grad)
    return exchanges(sharded.plan)


@pytest.mark.gloo
def test_on_two_processes() -> None:
    assert run_ranks(two_ranks, 2) == [EVERY, EVERY]
