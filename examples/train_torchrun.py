"""Train a sharded model: a script to copy.

    torchrun --standalone --nproc-per-node 2 examples/train_torchrun.py

It is an ordinary training script with one line more: `model = autoshard(model, …)`. Run without
torchrun it does the same on the in-process simulator, with every rank in one process.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import llama
import torch
import torch.distributed as dist

from autoshard import autoshard


def main() -> None:
    """Shard, train, save."""
    options = parse()
    launched = "WORLD_SIZE" in os.environ  # torchrun sets it
    world_size = int(os.environ.get("WORLD_SIZE", 2))
    cuda = torch.cuda.is_available() and launched
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    if launched:
        dist.init_process_group("nccl" if cuda else "gloo")
    main_rank = not launched or dist.get_rank() == 0

    # Every rank builds the same model: the same seed, or the same checkpoint.
    model, args, kwargs = llama.factory()
    if cuda:
        model, kwargs = model.cuda(), {name: x.cuda() for name, x in kwargs.items()}

    # The optimizer is made after sharding, from the sharded model's parameters.
    model = autoshard(model, world_size, args, kwargs, hardware=options.hardware)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if main_rank:
        model.report()

    for step in range(options.steps):
        batch = llama.batch(step)  # tensor parallelism: the same batch on every rank
        if cuda:
            batch = {name: x.cuda() for name, x in batch.items()}
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        if main_rank:
            print(f"step {step}: loss {loss.item():.4f}, gradient norm {norm.item():.3f}")

    # Every rank takes part in gathering; one writes. The names are the original model's.
    weights = model.full_state_dict()
    if main_rank and options.save:
        torch.save(weights, options.save)
        print(f"saved {len(weights)} tensors in {options.save}")
    if launched:
        dist.destroy_process_group()


def full(x: torch.Tensor) -> torch.Tensor:
    """The whole of what may be a DTensor; every rank has to ask, or those that do wait for ever."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", type=Path, help="where the trained weights go")
    parser.add_argument("--hardware", default="cpu-gloo", help="`autoshard hardware` lists them")
    return parser.parse_args()


if __name__ == "__main__":
    main()
