"""A training step of a small Llama on gloo processes: autoshard, torch's own tensor parallelism, by hand.

The programs train the same model with the same optimizer:

- autoshard: the plan that the solver finds with `search="tensor"`, no name given;
- autoshard, same layers: the same with the embedding and the head held replicated, as the next two do;
- parallelize_module: `torch.distributed.tensor.parallel` with the plan written by hand;
- by hand: local `nn.Linear` shards between Megatron's f and g, each a raw all-reduce.

Their steps are interleaved, round after round in one run, so that whatever else the machine does falls
on all of them alike; medians are compared. `python benchmarks/llama_step.py --help` for the options.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autoshard

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Settings:
    """What is timed: the sizes are those of the project's target."""

    ranks: int = 2
    layers: int = 4
    hidden: int = 512
    intermediate: int = 1376
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 1024
    batch: int = 4
    sequence: int = 128
    rounds: int = 15
    optimizer: str = "fused"
    hardware: str = "cpu-gloo"


def build(settings: Settings) -> nn.Module:
    """The unsharded model; the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        vocab_size=settings.vocabulary,
    )
    return LlamaForCausalLM(config)


def inputs(settings: Settings) -> dict[str, Any]:
    """Token ids and labels; the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(
        settings.vocabulary, (settings.batch, settings.sequence), generator=generator
    )
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


# --- the three programs -------------------------------------------------------------------------


def by_autoshard(settings: Settings) -> nn.Module:
    """The solver's plan."""
    return _sharded(settings, {})


def same_layers(settings: Settings) -> nn.Module:
    """The solver's plan for the layers alone: the set that the hand-written programs split."""
    ends = ("*embed_tokens.weight", "*lm_head.weight", "model.norm.weight")
    return _sharded(settings, dict.fromkeys(ends, "replicated"))


def _sharded(settings: Settings, constraints: dict[str, str]) -> nn.Module:
    sharded = autoshard.autoshard(
        build(settings),
        settings.ranks,
        kwargs=inputs(settings),
        hardware=settings.hardware,
        search="tensor",
        constraints=constraints,
    )
    for weight in sharded.plan.weights:
        last = weight.fqn.split(".")[-2]
        wanted = "column" if last in COLUMN else "row" if last in ROW else weight.split
        if weight.split != wanted:
            text = "%s is %s, where Megatron's plan has %s"
            logging.warning(text, weight.fqn, weight.split, wanted)
    return sharded


def by_parallelize_module(settings: Settings) -> nn.Module:
    """torch's own tensor parallelism, with the plan written by hand."""
    model = build(settings)
    mesh = init_device_mesh("cpu", (settings.ranks,), mesh_dim_names=("tp",))
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            names = [name for name, _ in block.named_children()]
            plan = {name: ColwiseParallel() for name in names if name in COLUMN}
            plan |= {name: RowwiseParallel() for name in names if name in ROW}
            parallelize_module(block, mesh, plan)
    return model


def by_hand(settings: Settings) -> nn.Module:
    """Local shards and raw all-reduces."""
    model = build(settings)
    rank = dist.get_rank()
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in list(block.named_children()):
                if name in COLUMN:
                    setattr(block, name, ColumnLinear(linear, rank, settings.ranks))
                elif name in ROW:
                    setattr(block, name, RowLinear(linear, rank, settings.ranks))
    share_inputs(model)
    return model


class CopyIn(torch.autograd.Function):
    """Megatron's f: nothing forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class ReduceOut(torch.autograd.Function):
    """Megatron's g: all-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _shard(weight: Tensor, dim: int, rank: int, ranks: int) -> nn.Parameter:
    return nn.Parameter(weight.detach().chunk(ranks, dim)[rank].clone())


class ColumnLinear(nn.Module):
    """Rows of the weight: columns of the result."""

    def __init__(self, linear: nn.Linear, rank: int, ranks: int) -> None:
        super().__init__()
        self.weight = _shard(linear.weight, 0, rank, ranks)

    def forward(self, x: Tensor) -> Tensor:
        """The local columns."""
        return nn.functional.linear(x, self.weight)


class RowLinear(nn.Module):
    """Columns of the weight: shares of the result, summed."""

    def __init__(self, linear: nn.Linear, rank: int, ranks: int) -> None:
        super().__init__()
        self.weight = _shard(linear.weight, 1, rank, ranks)

    def forward(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        return ReduceOut.apply(nn.functional.linear(x, self.weight))


def share_inputs(model: nn.Module) -> None:
    """One f for the layers that share an input: q, k and v; gate and up."""

    def enter(
        module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        if args:
            return (CopyIn.apply(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": CopyIn.apply(kwargs["hidden_states"])}

    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            block.register_forward_pre_hook(enter, with_kwargs=True)


PROGRAMS: dict[str, Callable[[Settings], nn.Module]] = {
    "autoshard": by_autoshard,
    "autoshard, same layers": same_layers,
    "parallelize_module": by_parallelize_module,
    "by hand": by_hand,
}
OURS = ("autoshard", "autoshard, same layers")


# --- timing -------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "for-loop": {"foreach": False},
}


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """DTensors and plain tensors apart: `parallelize_module` leaves a model with both, which AdamW's
    foreach and fused kernels refuse in one group.
    """
    split = [
        [p for p in model.parameters() if isinstance(p, DTensor) is kind] for kind in (True, False)
    ]
    return [{"params": parameters} for parameters in split if parameters]


def measure(settings: Settings) -> dict[str, Any]:
    """On one rank of an initialised group: the times of each program's parts, and the losses."""
    models = {name: program(settings) for name, program in PROGRAMS.items()}
    given = inputs(settings)
    steps = {}
    for name, model in models.items():
        model.train()
        groups = parameter_groups(model)
        optimizer = torch.optim.AdamW(groups, lr=1e-4, **OPTIMIZERS[settings.optimizer])
        steps[name] = (model, optimizer)
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in models}
    losses: dict[str, list[float]] = {name: [] for name in models}
    for round_number in range(settings.rounds + 2):
        for name, (model, optimizer) in steps.items():
            dist.barrier()
            started = time.perf_counter()
            loss = model(**given).loss
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            done = time.perf_counter()
            losses[name].append(loss.item())
            if round_number > 1:  # the first two warm up
                times[name].append((forward - started, backward - forward, done - backward))
    return {"times": times, "losses": losses}


def _rank(rank: int, settings: Settings, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", settings.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.ranks)
    found = measure(settings)
    if rank == 0:
        Path(f"{folder}/times.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(settings: Settings) -> dict[str, Any]:
    """Start the ranks, time every program, and sum up: medians in milliseconds, and ratios."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (settings, folder), nprocs=settings.ranks)
        found = json.loads(Path(f"{folder}/times.json").read_text())
    _check_losses(found["losses"])
    medians = {
        name: {
            part: 1e3 * statistics.median(values)
            for part, values in zip(
                ("forward", "backward", "optimizer"), zip(*times, strict=True), strict=True
            )
        }
        | {"step": 1e3 * statistics.median(map(sum, times))}
        for name, times in found["times"].items()
    }
    return {"medians_ms": medians, "ratios": {name: _ratios(medians, name) for name in OURS}}


def _ratios(medians: dict[str, dict[str, float]], ours: str) -> dict[str, float]:
    return {
        name: medians[ours]["step"] / row["step"]
        for name, row in medians.items()
        if name not in OURS
    }


def _check_losses(losses: dict[str, list[float]]) -> None:
    """The programs must train alike, or their times say nothing."""
    for name, values in losses.items():
        for ours, theirs in zip(losses["autoshard"], values, strict=True):
            if abs(ours - theirs) > 1e-3 * abs(theirs):
                raise AssertionError(
                    f"autoshard and {name} do not train alike: {ours} and {theirs}"
                )


def main() -> None:
    """Print the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in Settings().__dict__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    print(json.dumps(run(Settings(**vars(parser.parse_args()))), indent=2))


if __name__ == "__main__":
    main()
