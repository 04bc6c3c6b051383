"""The patterns of the `test_pitfalls` files that speak of ranks, on real processes: trained beside the unsharded model.

Each is as the simulator's test has it, in float64; here every rank holds its own slices alone, as `DTensor`s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pitfall_models as models
import pytest
import torch
import torch.distributed as dist
from oracle import IDEAL_ALL, IDEAL_TENSOR, assert_sound
from pinned import pinned_plan
from processes import run_ranks
from test_pitfalls_in_place import InPlace
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

Case = tuple[nn.Module, tuple[Any, ...], Mapping[str, str]]


def _words(model: nn.Module, vocabulary: int) -> Case:
    return model, (torch.randint(0, vocabulary, (2, 6)),), {}


def _x(model: nn.Module, *shape: int, **asked: str) -> Case:
    return model, (torch.randn(*shape),), {f"{n}.weight": split for n, split in asked.items()}


def _column_row(between: nn.Module) -> Case:
    return _x(models.Between(between), 2, 5, 12, a="column", b="row")


def _loss(**options: Any) -> Case:
    given = torch.randn(12, 12), torch.randint(0, 24, (12,))
    return models.Loss(24, **options), given, {"head.weight": "column"}


def _probabilities() -> Case:
    given = torch.randn(12, 12), torch.rand(12, 24, dtype=torch.float64).softmax(-1)
    return models.Loss(24, label_smoothing=0.1), given, {"head.weight": "column"}


def _mlp(*widths: int) -> nn.Module:
    a, b, c = widths
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c))


SHARES = ["add", "rsub", "where", "masked", "pad", "mean"]
PATTERNS: dict[str, Callable[[], Case]] = {
    "fused qkv by chunk": lambda: _x(models.ChunkedThenHeads(), 2, 5, 24),
    "fused qkv by heads": lambda: _x(models.HeadsOutside(), 2, 5, 24),
    "gate and up in one product": lambda: _x(models.GateUp(), 2, 5, 12),
    "row-parallel bias": lambda: (_mlp(12, 24, 12), (torch.randn(4, 12),), {"0.weight": "column", "2.weight": "row"}),
    "two row-parallel branches": lambda: _x(models.TwoBranches(), 2, 5, 24),
    "tied head": lambda: _words(models.TiedHead(), 24),
    "tied head of an odd vocabulary": lambda: _words(models.TiedHead(97), 97),
    "softmax between": lambda: _column_row(nn.Softmax(-1)),
    "x / norm(x) between": lambda: _column_row(models.DividedByNorm()),
    "layer norm between": lambda: _column_row(nn.LayerNorm(24)),
    **{f"a {what} for each head": lambda what=what: _x(models.PerHead(what), 2, 5, 24)
       for what in ("buffer", "parameter", "scale", "relative")},
    "norm of each head": lambda: _x(models.NormOfEachHead(), 2, 5, 24),
    **{f"partial sums, then {after}": lambda after=after: _x(models.Shares(after), 4, 12, a="column", b="row")
       for after in SHARES},
    **{f"convolutions, {name}": lambda name=name: _x(models.CONVOLUTIONS[name](), 4, 6, 8, 8)
       for name in ("conv2d", "depthwise", "batch norm", "group norm")},
    "cross entropy, smoothed": lambda: _loss(label_smoothing=0.1),
    "cross entropy, ignored": lambda: _loss(ignore_index=3, label_smoothing=0.1),
    "cross entropy, sum": lambda: _loss(reduction="sum"),
    "cross entropy, none": lambda: _loss(reduction="none", label_smoothing=0.1),
    "cross entropy, class probabilities": _probabilities,
    "batch norm, training": lambda: _x(models.Normed(nn.BatchNorm1d(12)), 12, 12),
    "three heads": lambda: _x(models.Heads(3, 3), 2, 5, 12),
    "fewer key/value heads than ranks": lambda: _x(models.Heads(4, 2), 2, 5, 16, q="column", out="row"),
    "multi-query": lambda: _x(models.GroupedQueries(4, 1), 2, 5, 16, q="column", out="row"),
    "an empty shard": lambda: _x(_mlp(8, 5, 8), 4, 8),
    "a vocabulary of 11": lambda: _words(models.Language(11), 11),
    "a sequence of 5": lambda: _x(models.TwoBranches(), 1, 5, 24),
    "rotary tables": lambda: _x(models.Rotary(), 2, 5, 48),
    "in place": lambda: _x(InPlace("slice_is_set"), 4, 12, a="column"),
}  # fmt: skip


def train(name: str) -> None:
    """Train it on this rank, beside the unsharded model, under either search."""
    for options in (IDEAL_TENSOR, IDEAL_ALL):
        torch.manual_seed(0)
        model, given, asked = PATTERNS[name]()
        size = dist.get_world_size()
        sharded = assert_sound(model, given, ranks=size, constraints=asked, **options)
        assert all(isinstance(p, DTensor) for p in sharded.parameters())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_on_processes(name: str, size: int) -> None:
    run_ranks(train, size, name)


PINNED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, str], dict[str, str]]] = {
    "batch norm with the batch split": (
        lambda: nn.BatchNorm1d(12), (10, 12),
        {"batch_norm": "S(0) R R I I -> S(0) [split_batch_norm]"}, {},
    ),
    "softmax of a split dimension": (
        lambda: models.Between(nn.Softmax(-1)), (2, 5, 12),
        {"softmax": "S(2) -> S(2) [split_softmax]"}, {"a.weight": "column", "b.weight": "row"},
    ),
    "layer norm of a split dimension": (
        lambda: models.Between(nn.LayerNorm(24)), (2, 5, 12),
        {"layer_norm": "S(2) S(0) S(0) -> S(2) [split_layer_norm]"}, {"a.weight": "column", "b.weight": "row"},
    ),
    "a sequence of 5 that is split": (
        models.TwoBranches, (1, 5, 24),
        {"layer_norm": "S(1) R R -> S(1)", "gelu": "S(1) -> S(1)", "/aten.add.Tensor#1": "S(1) S(1) -> S(1)"}, {},
    ),
}  # fmt: skip


def train_pinned(name: str) -> None:
    torch.manual_seed(0)
    build, shape, strategies, asked = PINNED[name]
    model, given, size = build(), (torch.randn(shape),), dist.get_world_size()
    plan = pinned_plan(model, given, size, strategies, asked)
    assert_sound(model, given, ranks=size, plan=plan)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", PINNED)
def test_a_split_statistic_or_sequence_on_processes(name: str, size: int) -> None:
    run_ranks(train_pinned, size, name)


# --- what is held and trained -------------------------------------------------------------------


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def slices() -> None:
    """A rank has its part of q, its part of k and its part of v; of heads outside, a plain part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for build, blocks in ((models.ChunkedThenHeads, 3), (models.HeadsOutside, 1)):
        torch.manual_seed(0)
        model = build()
        sharded = autoshard.autoshard(model, size, (torch.randn(2, 5, 24),), **IDEAL_TENSOR)
        parts = [block.chunk(size)[rank] for block in model.qkv.weight.chunk(blocks)]
        held = dict(sharded.named_parameters())["qkv.weight"]
        assert torch.equal(held.to_local(), torch.cat(parts))
        assert torch.equal(held.full_tensor(), model.qkv.weight)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_slice_of_each_block_of_a_fused_weight(size: int) -> None:
    run_ranks(slices, size)


def _mixed() -> nn.Module:
    """Layers whose parameters are kept split, split in blocks, and whole."""
    torch.manual_seed(0)
    return models.TwoBranches().double()


MIXED = {
    "norm.*": "replicated",
    "attention.qkv.weight": "shard(0,3)",
    "mlp.0.weight": "column",
    "mlp.2.weight": "row",
}
MIXED |= {"mlp.2.bias": "replicated", "attention.out.bias": "replicated"}


def norms() -> None:
    model, x = _mixed(), torch.randn(2, 5, 24, dtype=torch.float64)
    sharded = autoshard.autoshard(
        model, dist.get_world_size(), (x,), constraints=MIXED, **IDEAL_TENSOR
    )
    assert len({str(p.placements) for p in sharded.parameters()}) == 4
    for clip in (nn.utils.clip_grad_norm_, lambda _, *given: sharded.clip_grad_norm_(*given)):
        for norm_type in (2.0, 1.0, float("inf")):
            for module in (model, sharded):
                module.zero_grad()
                module(x).square().sum().backward()
            wanted = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
            found = clip(sharded.parameters(), 0.1, norm_type)
            torch.testing.assert_close(_whole(found), wanted)
            for ours, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(_whole(ours.grad), theirs.grad)


@pytest.mark.parametrize("size", [2, 4])
def test_gradient_norm_over_a_mix_of_sharded_and_replicated_parameters(size: int) -> None:
    run_ranks(norms, size)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "sgd with momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
    "sgd with momentum, foreach": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, foreach=True),
}


def steps(name: str) -> None:
    model, x = _mixed(), torch.randn(2, 5, 24, dtype=torch.float64)
    sharded = autoshard.autoshard(
        model, dist.get_world_size(), (x,), constraints=MIXED, **IDEAL_TENSOR
    )
    for module in (model, sharded):
        optimizer = OPTIMIZERS[name](module.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(_whole(ours), theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_on_what_parameters_gives(name: str) -> None:
    run_ranks(steps, 2, name)


def built_before() -> None:
    """Two steps before sharding, one after: moments of AdamW go over with the parameters."""
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, reference = _mixed(), _mixed()
    pairs = [(m, torch.optim.AdamW(m.parameters(), 1e-2)) for m in (model, reference)]
    for module, optimizer in pairs * 2:
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
    size = dist.get_world_size()
    sharded = autoshard.autoshard(model, size, (x,), constraints=MIXED, **IDEAL_TENSOR)
    sharded.rebind(pairs[0][1])
    for module, (_, optimizer) in zip((sharded, reference), pairs, strict=True):
        module.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
    for ours, theirs in zip(sharded.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(_whole(ours), theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("size", [2, 4])
def test_an_optimizer_built_before_sharding_is_moved_over(size: int) -> None:
    run_ranks(built_before, size)
