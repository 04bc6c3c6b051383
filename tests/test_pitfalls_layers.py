"""Layers on which tensor-parallel tools go wrong: biases, partial sums, norms, convolutions, recurrences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import H100, assert_sound, placements, split_share
from pinned import pinned_plan
from pitfall_models import (
    BOTH,
    CONVOLUTIONS,
    RANKS,
    Between,
    DividedByNorm,
    GateUp,
    Normed,
    Shares,
    TwoBranches,
    kinds,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@RANKS
@BOTH
def test_gate_and_up_in_one_product(ranks: int, options: dict[str, str]) -> None:
    sharded = assert_sound(GateUp(), (torch.randn(2, 5, 12),), ranks=ranks, **options)
    if options["search"] == "tensor":
        where = placements(sharded.plan)
        assert where["gate_up.weight"] == "S(0,2)"
        assert where["down.weight"] == "S(1)"
        asked = {"gate_up.weight": "shard(0,2)"}
        sharded = assert_sound(
            GateUp(), (torch.randn(2, 5, 12),), ranks=ranks, constraints=asked, **H100
        )
        assert kinds(sharded) == ["all_reduce"]


class Glu(GateUp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.glu(self.gate_up(x), -1))


@RANKS
@BOTH
def test_glu_looks_across_the_split(ranks: int, options: dict[str, str]) -> None:
    assert_sound(Glu(), (torch.randn(2, 5, 12),), ranks=ranks, **options)


ROWS = dict.fromkeys(("attention.qkv.weight", "mlp.0.weight"), "column")
ROWS |= dict.fromkeys(("attention.out.weight", "mlp.2.weight"), "row")


@RANKS
@BOTH
def test_row_parallel_bias_is_added_once(ranks: int, options: dict[str, str]) -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
    constraints = {"0.weight": "column", "2.weight": "row", "2.bias": "replicated"}
    x = torch.randn(4, 12)
    sharded = assert_sound(model, (x,), ranks=ranks, constraints=constraints, **options)
    assert placements(sharded.plan)["2.weight"] == "S(1)"
    plan = pinned_plan(model, (x,), ranks, {}, constraints, options["search"], shares=True)
    assert_sound(model, (x,), ranks=ranks, plan=plan)


@RANKS
@BOTH
def test_two_row_parallel_branches_add_their_biases_once(
    ranks: int, options: dict[str, str]
) -> None:
    model, x = TwoBranches(), torch.randn(2, 5, 24)
    sharded = assert_sound(model, (x,), ranks=ranks, constraints=ROWS, **options)
    assert {placements(sharded.plan)[name] for name in ROWS if ROWS[name] == "row"} == {"S(1)"}
    plan = pinned_plan(model, (x,), ranks, {}, ROWS, options["search"], shares=True)
    assert_sound(model, (x,), ranks=ranks, plan=plan)


class BranchesMeet(TwoBranches):
    """The two sums meet before they are reduced."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + (self.attention(y) + self.mlp(y))


@RANKS
@pytest.mark.parametrize("biases", [True, False])
def test_two_row_parallel_branches_meet_before_one_reduction(ranks: int, biases: bool) -> None:
    model = BranchesMeet()
    if not biases:
        model.attention.out.bias = model.mlp[2].bias = None
    given = (torch.randn(2, 5, 24),)
    sharded = assert_sound(model, given, ranks=ranks, constraints=ROWS, **H100)
    reduced = [c.kind for c in sharded.plan.collectives if c.phase == "forward"]
    assert reduced == ["all_reduce"] * (2 if biases else 1)


class Rms(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + x.amax(-1, keepdim=True)


@RANKS
@BOTH
@pytest.mark.parametrize(
    "between",
    [nn.Softmax(-1), nn.LogSoftmax(-1), nn.LayerNorm(24), nn.RMSNorm(24), DividedByNorm(), Rms(), Centred(),
     nn.Softmin(-1), nn.LocalResponseNorm(3)],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_a_reduction_between_column_and_row(
    between: nn.Module, ranks: int, options: dict[str, str]
) -> None:
    x = (
        torch.randn(2, 5, 12)
        if not isinstance(between, nn.LocalResponseNorm)
        else torch.randn(2, 12)
    )
    if isinstance(between, nn.LocalResponseNorm):
        between = nn.Sequential(nn.Unflatten(-1, (24, 1)), between, nn.Flatten())
    asked = {"a.weight": "column", "b.weight": "row"}
    for constraints in ({}, asked):
        assert_sound(Between(between), (x,), ranks=ranks, constraints=constraints, **options)


STATISTICS = {
    "softmax": (nn.Softmax(-1), "S(2) -> S(2) [split_softmax]"),
    "linalg_vector_norm": (DividedByNorm(), "S(2) -> I [split_vector_norm]"),
    "layer_norm": (nn.LayerNorm(24), "S(2) S(0) S(0) -> S(2) [split_layer_norm]"),
    "rms_norm": (nn.RMSNorm(24), "S(2) S(0) -> S(2) [split_rms_norm]"),
}


@RANKS
@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_reduced_between_column_and_row(name: str, ranks: int) -> None:
    """The layers are paired, and what lies between has a slice on each rank: never the whole."""
    between, strategy = STATISTICS[name]
    model, given = Between(between), (torch.randn(2, 5, 12),)
    asked = {"a.weight": "column", "b.weight": "row"}
    plan = pinned_plan(model, given, ranks, {name: strategy}, asked)
    sharded = assert_sound(model, given, ranks=ranks, plan=plan)
    assert "all_gather" not in kinds(sharded, "between")
    assert "all_reduce" in kinds(sharded, "between")


@RANKS
@BOTH
@pytest.mark.parametrize(
    "after",
    ["add", "add tensor", "rsub", "scale and add", "divide", "where", "masked", "clamp", "pad", "square",
     "cat", "addcmul", "lerp", "cumsum", "mean", "cast"],
)  # fmt: skip
def test_partial_sums_and_a_constant(after: str, ranks: int, options: dict[str, str]) -> None:
    bound, asked = 1e-6 if after == "cast" else 1e-9, {"a.weight": "column", "b.weight": "row"}
    model, given, search = Shares(after), (torch.randn(4, 12),), options["search"]
    assert_sound(model, given, ranks=ranks, bound=bound, constraints=asked, **options)
    # Shares are kept as such for as long as they may be, whatever comes: 10 is no share.
    made = {"b/aten.linear": "S(1) S(1) -> P"}
    plan = pinned_plan(model, given, ranks, made, asked, search, shares=True)
    assert_sound(model, given, ranks=ranks, bound=bound, plan=plan)


@RANKS
@BOTH
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, ranks: int, options: dict[str, str]) -> None:
    model = CONVOLUTIONS[name]()
    channels = next(p for p in model.modules() if hasattr(p, "in_channels")).in_channels
    x = torch.randn(4, channels, 8) if name == "conv1d" else torch.randn(4, channels, 8, 8)
    assert_sound(model, (x,), ranks=ranks, **options)


@pytest.mark.parametrize("name", ["conv2d", "depthwise", "batch norm", "pooled"])
def test_convolutions_with_output_channels_split(name: str) -> None:
    sharded = assert_sound(CONVOLUTIONS[name](), (torch.randn(4, 6, 8, 8),))
    assert split_share(sharded.plan) >= 0.9
    made = [c.strategy for c in sharded.plan.choices if "conv" in c.key]
    assert any(strategy.endswith("-> S(1)") for strategy in made), made


@RANKS
def test_a_depthwise_convolution_has_its_groups_divided(ranks: int) -> None:
    given = (torch.randn(4, 6, 8, 8),)
    sharded = assert_sound(CONVOLUTIONS["depthwise"](), given, ranks=ranks)
    assert placements(sharded.plan)["1.weight"] == "S(0)"
    nodes = [n for n in sharded.graph_module.graph.nodes if "conv2d" in str(n.target)]
    assert [n.args[6] for n in nodes if len(n.args) > 6] == [12 // ranks]


@RANKS
@BOTH
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(ranks: int, training: bool, options: dict[str, str]) -> None:
    model = Normed(nn.BatchNorm1d(12, momentum=0.3)).train(training)
    assert_sound(model, (torch.randn(12, 12) * 3 + 1,), ranks=ranks, **options)


@RANKS
@pytest.mark.parametrize("shape", [(12, 12), (10, 12), (7, 12, 3)], ids=str)
def test_batch_norm_in_training_with_the_batch_split(shape: tuple[int, ...], ranks: int) -> None:
    model = nn.Sequential(nn.BatchNorm1d(12, momentum=0.3), nn.Tanh())
    given = (torch.randn(shape) * 3 + 1,)
    split = {"batch_norm": "S(0) R R I I -> S(0) [split_batch_norm]"}
    plan = pinned_plan(model, given, ranks, split)
    assert_sound(model, given, ranks=ranks, plan=plan)


@RANKS
@BOTH
def test_linear_8_5_and_linear_5_8(ranks: int, options: dict[str, str]) -> None:
    """On 2 ranks 5 is cut into 3 and 2; on 4 one would have nothing (2, 2, 1, 0), and 8 alone is cut."""
    model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 8))
    given = (torch.randn(4, 8),)
    sharded = assert_sound(model, given, ranks=ranks, **options)
    if ranks < 4:
        asked = {"0.weight": "column", "2.weight": "row"}
        assert_sound(model, given, ranks=ranks, constraints=asked, **options)
    else:
        assert placements(sharded.plan)["0.bias"] == "I"
        reasons = {w.fqn: w.reason for w in sharded.plan.weights}
        assert "no dimension of [5] has a slice for each of 4 ranks" in reasons["0.bias"]


@RANKS
@BOTH
def test_conv1d_of_transformers(ranks: int, options: dict[str, str]) -> None:
    """A product whose weight lies the other way round: by column is along dimension 1."""
    model = nn.Sequential(Conv1D(24, 12), nn.GELU(), Conv1D(12, 24))
    sharded = assert_sound(model, (torch.randn(2, 5, 12),), ranks=ranks, **options)
    if options["search"] == "tensor":
        where = placements(sharded.plan)
        assert (where["0.weight"], where["2.weight"]) == ("S(1)", "S(0)")


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.emb, self.rnn = nn.Linear(6, 12), kind(12, 12, batch_first=True, **options)
        self.head = nn.Linear(12 * (2 if options.get("bidirectional") else 1), 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.emb(x))[0])


@RANKS
@BOTH
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.RNNBase], ranks: int, options: dict[str, str]) -> None:
    sharded = assert_sound(Recurrent(kind), (torch.randn(2, 5, 6),), ranks=ranks, **options)
    weight = next(w for w in sharded.plan.weights if w.fqn == "rnn.weight_ih_l0")
    assert weight.split != "replicated" or weight.reason == "rnn needs it whole"


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "MultiheadAttention": (nn.MultiheadAttention(24, 6, batch_first=True), (2, 5, 24)),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(24, 6, 48, 0.0, batch_first=True), (2, 5, 24)),
    "Conv1D": (Conv1D(48, 24), (2, 5, 24)),
    "GroupNorm": (nn.Sequential(nn.Conv2d(6, 12, 3), nn.GroupNorm(4, 12)), (2, 6, 5, 5)),
    "LSTM": (nn.LSTM(12, 12, batch_first=True), (2, 5, 12)),
}  # fmt: skip


class Itself(nn.Module):
    """A layer given one tensor for all of its inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(*[x] * (3 if isinstance(self.layer, nn.MultiheadAttention) else 1))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_sharded_or_replicated_and_named(name: str) -> None:
    layer, shape = LAYERS[name]
    sharded = assert_sound(Itself(layer), (torch.randn(shape),))
    if name == "LSTM":
        assert {weight.reason for weight in sharded.plan.weights} == {"layer needs it whole"}
    else:
        assert split_share(sharded.plan) == 1.0


def test_a_bidirectional_lstm_of_two_layers() -> None:
    model = Recurrent(nn.LSTM, num_layers=2, bidirectional=True)
    assert_sound(model, (torch.randn(2, 5, 6),))
