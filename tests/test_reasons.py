"""What a plan says of its decisions is true, concrete, and in the order in which things happen."""

from __future__ import annotations

import math

import pytest
import torch
from models import MODELS, llama_8b
from torch import Tensor, nn

import autoshard
from autoshard.plan_types import CollectiveRecord, Plan
from autoshard.planner import words


@pytest.fixture(scope="module")
def llama() -> Plan:
    """Megatron's plan of two layers of Llama 3 8B for 8 H100s."""
    model, kwargs = llama_8b(2)
    return autoshard.plan(model, 8, kwargs=kwargs, hardware="h100-sxm")


def told(c: CollectiveRecord) -> tuple[str, str, int, str, str]:
    return c.phase, c.kind, c.count, c.module, c.reason


def test_collectives_of_a_llama(llama):
    share, summed = "is a share; the shares are summed", "the shares are summed"
    layer = "model.layers.*"
    classes = "each rank has a slice of the classes; this"
    assert [told(c) for c in llama.collectives] == [
        (
            *("forward", "all_gather", 1, "model.embed_tokens"),
            (
                "each rank has a slice of the result of embed_tokens; gathered, whole for input_layernorm "
                "and add in layers.*"
            ),
        ),
        (
            "forward",
            "all_reduce",
            2,
            f"{layer}.self_attn.o_proj",
            f"each rank's result of o_proj {share}",
        ),
        (
            "forward",
            "all_reduce",
            2,
            f"{layer}.mlp.down_proj",
            f"each rank's result of down_proj {share}",
        ),
        ("forward", "all_reduce", 1, "", f"{classes} finds the greatest logit of each row"),
        (
            "forward",
            "all_reduce",
            1,
            "",
            f"{classes} sums each row, and finds the logit of its target",
        ),
        (
            *("forward", "all_gather", 1, "lm_head"),
            "each rank has a slice of the result of lm_head; gathered, for it is returned whole",
        ),
        (
            "backward",
            "all_reduce",
            1,
            "lm_head",
            f"each rank's gradient of the input of lm_head {share}",
        ),
        (
            *("backward", "all_reduce", 2, f"{layer}.mlp"),
            f"each rank's gradient of the input of gate_proj and up_proj is a share; {summed} once for both",
        ),
        (
            *("backward", "all_reduce", 2, f"{layer}.self_attn"),
            (
                f"each rank's gradient of the input of q_proj, k_proj and v_proj is a share; {summed} once for "
                "all three"
            ),
        ),
    ]


def test_weights_of_a_llama(llama):
    reasons = {w.group.removesuffix(".weight").rpartition(".")[2]: w.reason for w in llama.weights}
    column = "output features split: each rank makes its part of the result from the whole input"
    row = "input features split, as its input comes: each rank's result is a share"
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
    assert {reasons[name] for name in columns} == {column}
    assert {reasons[name] for name in ("o_proj", "down_proj")} == {row}
    assert reasons["embed_tokens"] == "features split: each rank looks up its part of every row"
    # 4096 elements of 2 bytes, with a gradient and two averages of as many, on 8 ranks
    saved = (2 + 2 + 4) * 4096 * 7 // 8 // 1024
    assert reasons["norm"] == f"splitting it would save {saved} KiB of a rank's memory, and no time"


@pytest.mark.slow
@pytest.mark.parametrize("search", ["tensor", "all"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_records_of_every_model(name, search):
    """Collectives communicate, forward comes first, their times are part of the plan's; all have reasons."""
    model, kwargs = MODELS[name]()
    plan = autoshard.plan(model, 2, kwargs=kwargs, search=search, hardware="cpu-gloo")
    assert all(
        c.kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for c in plan.collectives
    )
    phases = [c.phase for c in plan.collectives]
    assert phases == sorted(phases, reverse=True)
    assert len(
        {(*told(c)[:2], c.module, c.op, c.tensor_shape, c.reason) for c in plan.collectives}
    ) == len(phases)
    listed = math.fsum(c.count * c.time_s for c in plan.collectives if "this" not in c.reason)
    assert listed <= plan.cost.comm_s * (1 + 1e-9)
    names = [fqn for weight in plan.weights for fqn in weight.fqns]
    assert sorted(names) == sorted(dict(model.named_parameters(remove_duplicate=False)))
    for record in (*plan.weights, *plan.collectives):
        assert record.reason
        assert "aten." not in record.reason or "has no rule" in record.reason
        assert "  " not in record.reason


def test_blocks_and_ties():
    model, kwargs = MODELS["gpt2"]()
    plan = autoshard.plan(model, 2, kwargs=kwargs, hardware="ideal")
    weights = {fqn: weight for weight in plan.weights for fqn in weight.fqns}
    fused = weights["transformer.h.0.attn.c_attn.weight"]
    assert fused.reason.endswith("; cut alike inside each of 3 blocks")
    tied = weights["lm_head.weight"]
    assert tied is weights["transformer.wte.weight"]
    if tied.split == "vocab":
        assert tied.reason.endswith(
            "and its result is a share; for lm_head they are the output features"
        )


class Stack(nn.Module):
    """Much data, little weight: data parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().mean()


def stack_plan(**options) -> Plan:
    return autoshard.plan(
        Stack(), 4, (torch.randn(1 << 14, 64),), hardware="cpu-gloo", search="all", **options
    )


def test_the_weights_of_data_parallelism_are_whole_and_their_gradients_summed():
    plan = stack_plan()
    assert {w.split for w in plan.weights} == {"replicated"}
    assert all(
        w.reason.endswith("; each rank's gradient is a share, and summed") for w in plan.weights
    )
    summed = [c for c in plan.collectives if c.phase == "backward"]
    assert [(c.kind, c.module) for c in summed] == [
        ("all_reduce", "second"),
        ("all_reduce", "first"),
    ]
    assert (
        summed[0].reason
        == "each rank's gradient of second.weight is a share; the shares are summed"
    )


def test_weights_that_are_stored_split_and_gathered_are_no_columns():
    tight = stack_plan().cost.memory.peak_bytes - 30_000
    plan = stack_plan(memory_budget=tight)
    stored = [w for w in plan.weights if w.split == "shard"]
    assert stored
    for weight in stored:
        name = weight.fqn.partition(".")[0]
        assert weight.reason == f"each rank stores a slice; gathered for {name}"
        gathers = [c for c in plan.collectives if c.kind == "all_gather" and c.module == name]
        assert f"each rank stores a slice of {weight.fqn}; gathered, whole for {name}" in {
            c.reason for c in gathers
        }


@pytest.mark.parametrize(
    ("model", "ranks", "constraints", "reason"),
    [
        (nn.Linear(8, 8), 1, {}, "there is one rank"),
        (nn.Linear(5, 5), 4, {}, "no dimension of [5, 5] has a slice for each of 4 ranks"),
        (nn.LayerNorm(8), 2, {}, "layer_norm needs it whole"),
        (nn.Linear(8, 8), 2, {"weight": "replicated"}, "a constraint asks for it"),
        (
            *(nn.Linear(8, 8, bias=False), 2, {"weight": "column"}),
            (
                "output features split: each rank makes its part of the result from the whole input, as a "
                "constraint asks"
            ),
        ),
        (
            *(nn.Linear(8, 8, bias=False), 2, {"weight": "row"}),
            (
                "input features split, and its input is cut to match: each rank's result is a share, as a "
                "constraint asks"
            ),
        ),
        (
            nn.Conv2d(4, 4, 3, bias=False),
            2,
            {"weight": "column"},
            "output channels split: each rank makes",
        ),
    ],
)
def test_reasons_of_a_weight(model, ranks, constraints, reason):
    wide = getattr(model, "in_features", None) or getattr(model, "normalized_shape", (4, 6, 6))
    x = torch.randn(2, *(wide if isinstance(wide, tuple) else (wide,)))
    plan = autoshard.plan(model, ranks, (x,), hardware="ideal", constraints=constraints)
    assert plan.weights[0].reason.startswith(reason)


def test_lists_of_names():
    assert words.listed(["a"]) == "a"
    assert words.listed(["a", "b", "a"]) == "a and b"
    assert words.listed("abcd") == "a, b, c and d"
    assert words.listed("abcdef") == "a, b, c and 3 more"
    assert words.tail("layers.*.mlp.up_proj") == "up_proj"
    assert words.tail("net.0") == "net.0"
    assert words.tail("0") == "module 0"
    assert words.weight("layers.0.mlp.up_proj.weight") == "up_proj.weight"
    assert [words.size(n) for n in (12, 1000, 57344, 3 << 30)] == [
        "12 B",
        "0.977 KiB",
        "56 KiB",
        "3 GiB",
    ]


# ---- notes ----------------------------------------------------------------------------------


def test_a_note_says_what_whole_results_cost(llama):
    (note,) = llama.notes
    assert note.startswith(
        "Returning the result of lm_head, [4, 2048, 128256], whole on every rank takes "
    )
    assert note.endswith(
        "% of the time: leave it out of what the model returns where nobody reads it."
    )


def test_a_note_names_large_weights_that_not_every_rank_can_have_a_slice_of():
    plan = autoshard.plan(nn.Linear(5, 9, bias=False), 8, (torch.randn(4, 5),), hardware="ideal")
    assert plan.notes == (
        "weight, [9, 5], is whole on every rank: none of its dimensions has a slice for each of 8 ranks.",
    )
    assert stack_plan().notes == ()


def test_a_note_says_where_a_rank_has_too_little_memory():
    model, kwargs = llama_8b(32)
    plan = autoshard.plan(model, 1, kwargs=kwargs, hardware="h100-sxm")
    assert plan.notes == (
        (
            "A rank needs 112 GiB at the peak, and one of h100-sxm has 74.5 GiB: use more ranks, a smaller "
            "batch, or search all."
        ),
    )
