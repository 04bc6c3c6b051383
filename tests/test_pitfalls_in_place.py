"""Writing in place to what is split, to weights, to inputs."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_sound
from pitfall_models import BOTH, RANKS, parameter
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class InPlace(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.a, self.b = nn.Linear(12, 24), nn.Linear(24, 12)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(getattr(self, self.what)(self.a(x)))

    def slice_is_set(self, y: Tensor) -> Tensor:
        y[:, 3:6] = 1
        return y * 2

    def slice_is_set_of_a_relu(self, y: Tensor) -> Tensor:
        z = y.relu() * 1
        z[1:, 3:6] = y[1:, :3]
        return z + y

    def added_to(self, y: Tensor) -> Tensor:
        return y.add_(1).mul_(2) + y

    def row_is_added(self, y: Tensor) -> Tensor:
        z = y.clone()
        z[0].add_(1)
        z[:, ::2].mul_(3)
        return z

    def masked(self, y: Tensor) -> Tensor:
        return y.masked_fill_(y.detach() > 0.5, 0.25)

    def index_copied(self, y: Tensor) -> Tensor:
        return y.clone().index_copy_(1, torch.tensor([0, 5]), y[:, 1:3] * 2)

    def index_added(self, y: Tensor) -> Tensor:
        return y.clone().index_add_(1, torch.tensor([0, 5, 5]), y[:, 1:4])

    def index_put(self, y: Tensor) -> Tensor:
        z = y.clone()
        z[torch.tensor([0, 2]), torch.tensor([1, 7])] = 5.0
        z[y.detach() > 0] = 0.5
        return z

    def scattered(self, y: Tensor) -> Tensor:
        index = torch.tensor([[0, 3], [1, 2], [4, 5], [6, 7]])
        return y.clone().scatter_(1, index, 0.0).scatter_add_(1, index, y[:, :2])

    def copied(self, y: Tensor) -> Tensor:
        z = torch.zeros_like(y)
        z.copy_(y)
        z[:, :12].copy_(y[:, 12:])
        return z

    def filled_by_parts(self, y: Tensor) -> Tensor:
        z = y.new_empty(y.shape)
        z[:, :12] = y[:, 12:]
        z[:, 12:] = y[:, :12].relu()
        return z

    def base_through_view(self, y: Tensor) -> Tensor:
        z = y * 1
        view = z.view(4, 4, 6)
        view[:, 1] += 1
        return z + view.flatten(1)

    def view_through_base(self, y: Tensor) -> Tensor:
        z = y * 1
        view = z.unflatten(1, (4, 6)).transpose(1, 2)
        z.mul_(2)
        return view.transpose(1, 2).flatten(1)

    def view_of_view(self, y: Tensor) -> Tensor:
        z = y * 1
        a, b = z[:, :12], z[:, 12:]
        a += b
        c = z[:, 6:18].unsqueeze(0)
        c.sub_(1)
        return torch.cat((b, a), 1) + z

    def several_views(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = y * 1
            a, b, c = z.chunk(3, 1)
            a.add_(b)
            z.mul_(2)
            c.copy_(a)
        return y * z + torch.cat((a, b, c), 1)

    def views_of_one_row_and_column(self, y: Tensor) -> Tensor:
        z = y * 1
        row, column = z[1], z.t()[2]
        row += 1
        column *= 2
        return z + row + column[:, None]

    def one_of_several_results(self, y: Tensor) -> Tensor:
        values, indices = y.topk(3, -1)
        values /= values.sum(-1, keepdim=True)
        return torch.zeros_like(y).scatter(-1, indices, values) + y

    def zeroed_and_filled(self, y: Tensor) -> Tensor:
        z, w = y * 1, y * 2
        z.zero_()
        w.fill_(3.0)
        return z + w + y

    def expanded(self, y: Tensor) -> Tensor:
        z = y.sum(0, keepdim=True)
        wide = z.expand(4, -1)
        z.mul_(2)
        return wide + y

    def reshaped(self, y: Tensor) -> Tensor:
        z = y * 1
        same, other = z.reshape(2, 2, 24), z.t().reshape(24, 4)
        z.add_(1)
        return same.flatten(0, 1) + other.t().contiguous() + z

    def read_before_and_after(self, y: Tensor) -> Tensor:
        z = y * 1
        before = z.sum(1, keepdim=True)
        z.add_(before)
        after = z.relu()
        return z.add_(1) + before + after

    def buffers_counted(self, y: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y - self.mean.clone()

    def buffer_replaced(self, y: Tensor) -> Tensor:
        self.mean.copy_(y.detach().sum(0))
        return y + self.mean.mean()

    def buffer_by_view(self, y: Tensor) -> Tensor:
        self.mean[3:6].add_(1)
        self.mean.view(4, 6)[0] *= 2
        return y * self.mean.exp()

    def relu_in_place(self, y: Tensor) -> Tensor:
        return F.relu_(y) + F.silu(y, inplace=False)

    def squeezed(self, y: Tensor) -> Tensor:
        z = (y * 1).unsqueeze_(1).squeeze_(1).transpose_(0, 1)
        return z.t()

    def out_argument(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.empty_like(y)
            torch.add(y, 1, out=z)
        return y * z


IN_PLACE = [name for name in vars(InPlace) if not name.startswith("_") and name != "forward"]


@RANKS
@BOTH
@pytest.mark.parametrize("what", IN_PLACE)
def test_in_place(what: str, ranks: int, options: dict[str, str]) -> None:
    assert_sound(InPlace(what), (torch.randn(4, 12),), ranks=ranks, **options)


@pytest.mark.parametrize("what", IN_PLACE)
@pytest.mark.parametrize("split", ["column", "row"])
def test_in_place_before_a_layer_that_is_split(what: str, split: str) -> None:
    constraints = {"a.weight": "column", "b.weight": split}
    assert_sound(InPlace(what), (torch.randn(4, 12),), constraints=constraints)


class Written(nn.Module):
    """What holds nothing that is trained until something trained is written to it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.a, self.b = what, nn.Linear(12, 12), nn.Linear(12, 24)
        self.token = parameter(12)
        self.register_buffer("zeros", torch.zeros(4, 12))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.what == "zeros":
            z = torch.zeros_like(y)
            for i in range(4):
                z[i] = y[i] * (i + 1) + (z[i - 1].clone() if i else 0)
        elif self.what == "input":
            z = x
            z[0] = self.token
        elif self.what == "buffer":
            z = self.zeros.clone()
            z[:, 3:6] = y[:, :3]
        else:
            with torch.no_grad():
                z = torch.zeros_like(y)
            view = z.t()
            view[2].copy_(y.sum(1))
        return self.b(z)


@pytest.mark.parametrize("split", ["column", "row"])
@pytest.mark.parametrize("what", ["zeros", "input", "buffer", "view"])
def test_gradients_flow_through_what_is_written(what: str, split: str) -> None:
    assert_sound(Written(what), (torch.randn(4, 12),), constraints={"b.weight": split})


class InputIsWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        y = self.a(x)
        x.mul_(2)
        return y + x


@BOTH
def test_an_input_that_is_written_to_is_written_to(options: dict[str, str]) -> None:
    model, x = InputIsWritten().double(), torch.randn(4, 12, dtype=torch.float64)
    sharded = autoshard.autoshard(model, 2, (x,), **options)
    mine, theirs = x.clone(), x.clone()
    torch.testing.assert_close(sharded(mine), model(theirs))
    torch.testing.assert_close(mine, theirs)


class RescalesWeights(nn.Module):
    """A trained weight that forward writes to, by way of a view, between two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(x).detach()
        with torch.no_grad():
            self.b.weight.div_(2)
            self.b.weight[:3].add_(1)
            self.a.bias.zero_()
        return self.a(x) * self.b(x) + y


@RANKS
@BOTH
def test_weights_that_forward_writes_to(ranks: int, options: dict[str, str]) -> None:
    assert_sound(RescalesWeights(), (torch.randn(4, 12),), ranks=ranks, **options)


class MovingAverage(nn.Module):
    """A frozen weight that forward itself moves."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 12)
        self.slow = nn.Parameter(torch.randn(12, 12), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.mul_(0.9).add_(self.a.weight, alpha=0.1)
        return self.a(x) + x @ self.slow


@RANKS
@BOTH
def test_a_frozen_weight_that_forward_moves(ranks: int, options: dict[str, str]) -> None:
    assert_sound(MovingAverage(), (torch.randn(4, 12),), ranks=ranks, **options)
