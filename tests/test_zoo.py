"""The zoo: tiny models are built, they are sound, and a fault is seen however small the gradients are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import zoo
import zoo_models
from zoo_judge import judge, noise_of, rounded, step
from zoo_sizes import shrunk

from autoshard import autoshard
from autoshard.runtime.communicator import Simulator
from autoshard.runtime.slicing import take

pytestmark = pytest.mark.filterwarnings("ignore")


class KeyBias(nn.Module):
    """Attention: its key bias has no gradient in exact arithmetic, and a tiny one in floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return self.o(out.transpose(1, 2).flatten(-2))


def two_layers() -> nn.Module:
    return nn.Sequential(KeyBias(), KeyBias()).double()


def reference() -> zoo.Reference:
    torch.manual_seed(0)
    model, kwargs = two_layers(), {"input": torch.randn(2, 5, 16).double()}
    built = zoo_models.Built("key bias", model, kwargs, "base", {})
    wanted = step(built.model, built.kwargs)
    noise = noise_of(wanted, [rounded(built.model, built.kwargs, seed) for seed in (1, 2)])
    built.model.zero_grad(set_to_none=True)
    return zoo.Reference(built, built.model, built.kwargs, wanted, noise, "float64")


def test_a_gradient_that_is_nothing_but_noise_is_sound() -> None:
    ref = reference()
    key = ref.wanted.values["0.k.bias"].abs().max()
    assert 0 < key < 1e-15 < 1e-3 < ref.wanted.values["0.v.bias"].abs().max()
    record = zoo.score(ref, 2, "tensor")
    assert (record.status, record.split) == ("sound", 1.0), record


@pytest.mark.parametrize("dropped", ["forward", "backward"])
def test_a_sum_over_ranks_that_is_left_out_is_wrong(
    dropped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference()
    sharded = autoshard(two_layers(), 2, (), ref.kwargs, hardware="ideal", search="tensor")
    sharded.load_state_dict(ref.model.state_dict())
    whole, running = Simulator.reduce_scatter, ["forward"]

    def left_out(
        self: Simulator, xs: list[torch.Tensor], cut: tuple[int, ...]
    ) -> list[torch.Tensor]:
        if running[-1] == dropped:
            return [take(x, *cut[:2], r, self.size) for r, x in enumerate(xs)]
        return whole(self, xs, cut)

    plain = torch.Tensor.backward

    def backward(loss: torch.Tensor) -> None:
        running.append("backward")
        plain(loss)
        running.append("forward")

    assert judge(step(sharded, ref.kwargs), ref.wanted, ref.noise).status == "sound"
    monkeypatch.setattr(Simulator, "reduce_scatter", left_out)
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    assert judge(step(sharded, ref.kwargs), ref.wanted, ref.noise).status == "WRONG"


def test_a_small_gradient_that_is_wrong_is_wrong() -> None:
    ref = reference()
    found = step(ref.model, ref.kwargs)
    tiny = {**ref.wanted.values, "0.v.bias": ref.wanted.values["0.v.bias"] * 1e-9}
    assert judge(found, zoo.Run(tiny), ref.noise).status == "WRONG"
    other = {**found.values, "0.q.bias": found.values["0.q.bias"] * (1 + 1e-6)}
    assert judge(zoo.Run(other), ref.wanted, ref.noise).status == "WRONG"


def test_rounding_leaves_whole_numbers_and_infinities() -> None:
    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x.floor(), x.floor() - float("inf"), x / 3])

    x = torch.tensor([1.5, 2.5, -7.0])
    plain, moved = Whole()(x), rounded(Whole(), {"x": x}, seed=1).values["output 0"]
    assert torch.equal(moved[:6], plain[:6])
    assert not torch.equal(moved[6:], plain[6:])
    torch.testing.assert_close(moved[6:], plain[6:])


def test_numbers_are_shrunk_by_what_their_names_say() -> None:
    config = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "eps": 1e-5, "eos_token_id": 50256, "layer_types": ["a"] * 32, "part": {"vocab_size": 50257}, "dims": [1, 2]}  # fmt: skip
    small = shrunk(config, {"heads": 8})
    assert (small["hidden_size"], small["num_hidden_layers"], small["num_attention_heads"]) == (
        64,
        2,
        8,
    )
    assert small["part"] == {"vocab_size": 128}
    assert 64 <= small["eos_token_id"] < 128
    assert (small["layer_types"], small["eps"], small["dims"]) == (["a", "a"], 1e-5, [1, 2])


def test_a_model_is_built_alike_every_time() -> None:
    one, two = zoo_models.build("mixtral"), zoo_models.build("mixtral")
    assert one.kwargs.keys() == two.kwargs.keys() >= {"input_ids", "labels"}
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["opt", "swin", "mixtral", "whisper", "diffusers:DiTTransformer2DModel"]
)
def test_architectures_are_sound_and_split(name: str) -> None:
    ref = zoo.reference(name)
    for ranks in (2, 3):
        record = zoo.score(ref, ranks, "tensor")
        assert record.status == "sound", record
        assert record.split is not None
        assert record.split >= zoo.DEEP


@pytest.mark.slow
def test_the_benchmark_prints_a_line_each_and_a_scoreboard(tmp_path: Path) -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, zoo.__file__, "vit", "detr", "--output", str(tmp_path / "zoo.jsonl")],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "sound" in done.stdout
    records = (tmp_path / "zoo.jsonl").read_text().splitlines()
    assert [('"sound"' in r, '"not built"' in r) for r in sorted(records)] == [
        (False, True),
        (True, False),
    ]
