"""Plans built by hand: what the tests of JSON, reports and the command line work on."""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.mesh import Mesh
from autoshard.placement import I, Layout, Shard, local_shape
from autoshard.plan_types import (
    Choice,
    CollectiveRecord,
    Cost,
    CostTerm,
    FallbackRecord,
    Memory,
    Part,
    Plan,
    SolverRecord,
    WeightRecord,
)

_ITEMSIZE = {"bfloat16": 2, "float32": 4}
_REASONS = {
    "vocab": "vocabulary split: ids that are not this rank's give zeros, then one all-reduce",
    "column": "output features split: its input is whole on every rank, so nothing is communicated",
    "row": "input features split: its input is already split so; the sum costs one all-reduce",
    "replicated": "small: splitting it would save 7 KiB and cost a collective",
}


def weight(
    name: str,
    shape: tuple[int, ...],
    split: str,
    layout: Layout,
    mesh: Mesh,
    *,
    group: str = "",
    dtype: str = "bfloat16",
    ties: tuple[str, ...] = (),
    trainable: bool = True,
) -> WeightRecord:
    local = local_shape(shape, layout, mesh.sizes)
    return WeightRecord(
        (name, *ties),
        shape,
        dtype,
        split,
        layout,
        local,
        math.prod(local) * _ITEMSIZE[dtype],
        _REASONS.get(split, "split as the mesh allows"),
        group or name,
        trainable,
    )


def llama_plan(layers: int = 32, ranks: int = 8) -> Plan:
    """Megatron's plan of an 8B Llama."""
    mesh = Mesh.of({"tp": ranks})
    column, row, whole = (Shard(0),), (Shard(1),), (I,)
    rows = [
        ("self_attn.q_proj", (4096, 4096), "column", column),
        ("self_attn.k_proj", (1024, 4096), "column", column),
        ("self_attn.v_proj", (1024, 4096), "column", column),
        ("self_attn.o_proj", (4096, 4096), "row", row),
        ("mlp.gate_proj", (14336, 4096), "column", column),
        ("mlp.up_proj", (14336, 4096), "column", column),
        ("mlp.down_proj", (4096, 14336), "row", row),
        ("input_layernorm", (4096,), "replicated", whole),
        ("post_attention_layernorm", (4096,), "replicated", whole),
    ]
    weights = [weight("model.embed_tokens.weight", (128256, 4096), "vocab", column, mesh)]
    for layer in range(layers):
        for name, shape, split, layout in rows:
            fqn, group = (f"model.layers.{at}.{name}.weight" for at in (layer, "*"))
            weights.append(weight(fqn, shape, split, layout, mesh, group=group))
    weights.append(weight("model.norm.weight", (4096,), "replicated", whole, mesh))
    weights.append(weight("lm_head.weight", (128256, 4096), "column", column, mesh))
    return Plan(
        "LlamaForCausalLM",
        "sha256:5f1c",
        mesh,
        "h100-sxm",
        "train",
        "tensor",
        None,
        tuple(weights),
        _llama_collectives(layers),
        (FallbackRecord("aten.cumsum.default", 1, 3.1e-6, ("model",)),),
        _costed(_llama_cost()),
        SolverRecord("HiGHS", "optimal", 0.60213, 0.60213, 0.0, 575, 1204, 0.131),
        (
            Choice("model.layers.*.mlp.down_proj/aten.linear.default#0", layers, "S(2) S(1) -> P"),
            Choice(
                "model.layers.*.self_attn.q_proj/aten.linear.default#0", layers, "R S(0) -> S(2)"
            ),
            Choice(
                "model.embed_tokens/aten.embedding.default#0", 1, "S(0) I -> P [vocab_embedding]"
            ),
        ),
        ("Dropout is off: every dropout probability of the model is 0.",),
        ("input_ids int64[4, 2048]", "labels int64[4, 2048]"),
    )


def _llama_collectives(layers: int) -> tuple[CollectiveRecord, ...]:
    hidden, size, time = (4, 2048, 4096), 4 * 2048 * 4096 * 2, 1.84e-4
    found = []
    for module, op in (
        ("self_attn.o_proj", "aten.linear.default"),
        ("mlp.down_proj", "aten.linear.default"),
    ):
        where = f"model.layers.*.{module}"
        why = "each rank holds a share of the sum over the split input features"
        found.append(
            CollectiveRecord(
                "all_reduce", "tp", "forward", hidden, size, layers, time, where, op, why
            )
        )
    for module in ("input_layernorm", "post_attention_layernorm"):
        where = f"model.layers.*.{module}"
        why = "each rank's columns give a share of the input's gradient"
        found.append(
            CollectiveRecord(
                "all_reduce", "tp", "backward", hidden, size, layers, time, where, "mul", why
            )
        )
    found.append(
        CollectiveRecord(
            "all_reduce", "tp", "forward", (4, 2048), 32768, 3, 1.2e-5, "", "cross_entropy_loss",
            "max, sum and picked logit of the split vocabulary",
        )
    )  # fmt: skip
    return tuple(found)


def _terms(compute_s: float, comm_s: float) -> tuple[CostTerm, ...]:
    """A step of products that grow with the batch, an optimizer that does not, and collectives."""
    part = Part
    plain = (part(0.2 * compute_s, "memory"), part(0.75 * compute_s, "arithmetic", 1, 1))
    kernels = ((part(0.05 * compute_s, "memory", 1, 1),), (part(0.01 * compute_s, "launch"),))
    ring = (part(0.1 * comm_s, "latency"), part(0.9 * comm_s, "bandwidth", 1, 1))
    tree = (part(0.02 * comm_s, "latency"), part(1.2 * comm_s, "bandwidth", 1, 1))
    found = (CostTerm("max", (plain,)), CostTerm("max", kernels))
    return (*found, CostTerm("min", (ring, tree))) if comm_s else found


def _costed(cost: Cost) -> Cost:
    """A cost with terms that sum to it, and its baselines with theirs."""
    known = {name: _costed(other) for name, other in cost.baselines.items()}
    return replace(cost, baselines=known, terms=_terms(cost.compute_s, cost.comm_s))


def _llama_cost() -> Cost:
    gib = 2**30
    return Cost(
        0.57852,
        0.02361,
        Memory(
            2007531520,
            2007531520,
            8030126080,
            21 * gib,
            1050673152,
            65792,
            0,
            3 * 2**20,
            (2007531520, 2**20, 8030126080, 20 * gib, 65792, 0, 1050673152),
            "backward, cross_entropy_loss",
        ),
        {
            "replicated": Cost(
                3.98201, 0.0, Memory(15 * gib, 15 * gib, 60 * gib, 64 * gib, 4 * gib)
            ),
            "megatron": Cost(
                0.57852, 0.02361, Memory(2007531520, 2007531520, 8030126080, 21 * gib, 1050673152)
            ),
            "fully_sharded": Cost(
                0.51201, 0.10423, Memory(2007531520, 2007531520, 8030126080, 8 * gib, 3 * gib)
            ),
            "all": Cost(
                0.50123, 0.09152, Memory(2007531520, 2007531520, 8030126080, 7 * gib, 3 * gib)
            ),
        },
    )


def slow_plan() -> Plan:
    """A small model on slow links: sharding it is slower than not. Names that look like markup."""
    mesh = Mesh.of({"tp": 2})
    return Plan(
        "Sequential",
        "sha256:00",
        mesh,
        "laptop",
        "infer",
        "all",
        1024,
        (
            weight("[bold]0.weight", (8, 6), "column", (Shard(0),), mesh, dtype="float32"),
            weight("[bold]0.bias", (8,), "column", (Shard(0),), mesh, dtype="float32"),
            weight("2.weight", (3, 8), "row", (Shard(1),), mesh, dtype="float32"),
            weight("2.scale", (), "replicated", (I,), mesh, dtype="float32", trainable=False),
        ),
        (
            CollectiveRecord(
                "all_reduce", "tp", "forward", (5, 3), 60, 1, 4.2e-5, "2", "linear", "a sum"
            ),
        ),
        (),
        Cost(
            1.2e-6, 4.2e-5, Memory(140, 0, 0, 800, 604), {"replicated": Cost(2e-6, 0.0, Memory(1, 0, 0, 4, 2))}
        ),
        SolverRecord(
            "CBC", "stopped at the time limit with a gap", 4.32e-5, -math.inf, 0.031, 40, 96
        ),
        (),
    )  # fmt: skip


def mesh_plan() -> Plan:
    """Two mesh axes, tied and fused weights, layers that differ, long names, no baselines."""
    mesh = Mesh.of({"dp": 4, "tp": 8})
    layer = "transformer.encoder.blocks"
    tail = "cross_attention.projection.query_key_value_fused.weight"
    shape = (12288, 4096)
    fused, whole = (I, Shard(0, 3)), (I, I)
    blocks = [
        weight(
            f"{layer}.{i}.{tail}",
            shape,
            "column" if i < 20 else "replicated",
            fused if i < 20 else whole,
            mesh,
            group=f"{layer}.*.{tail}",
        )
        for i in range(24)
    ]
    tied = weight(
        "wte.weight", (50304, 4096), "vocab", (Shard(1), Shard(0)), mesh, ties=("lm_head.weight",)
    )
    collectives = tuple(
        CollectiveRecord(
            kind, axis, phase, (64, 1024, 4096), 2**29, 24, 1.234e-3,
            f"{layer}.*.cross_attention", "scaled_dot_product_attention", "the batch is split",
        )
        for kind, axis, phase in (
            ("reduce_scatter", "dp", "backward"),
            ("all_gather", "dp", "forward"),
            ("all_to_all", "tp", "forward"),
        )
    )  # fmt: skip
    memory = Memory(2**34, 2**34, 2**36, 2**33, 2**30)
    return Plan(
        "GPT2LMHeadModel",
        "sha256:ab",
        mesh,
        "a100-sxm",
        "train",
        "all",
        80 * 2**30,
        (tied, *blocks),
        collectives,
        tuple(
            FallbackRecord(f"my_library.very_long_operator_name_{i}.default", 24, 1e-3 / (i + 1), (layer + ".*.a", layer + ".*.b"))
            for i in range(3)
        ),
        Cost(1.5, 0.25, memory),
        SolverRecord("HiGHS", "optimal", 1.75, 1.749999, 5.7e-7, 3758, 111535, 26.2),
        (),
        uniform=False,
        constraints=(("wte.*", "vocab"), ("*.bias", "replicated")),
    )  # fmt: skip


PLANS = {"llama": llama_plan, "slow": slow_plan, "mesh": mesh_plan}
