"""Plan a model that this machine could not hold, keep the plan, read it again.

python examples/plan_only.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import llama

import autoshard


def main(folder: Path) -> None:
    """Plan, save, load, explain, compare."""
    # On the meta device a tensor is a shape: 8 billion parameters take no memory.
    model, args, kwargs = llama.llama_8b()

    # What would 8 H100s do with it? Tensor parallelism: every weight by column, by row, or whole.
    plan = autoshard.plan(model, world_size=8, args=args, kwargs=kwargs, hardware="h100-sxm")
    plan.report()

    # A plan is a value: saved as JSON, compared, applied again without a solver.
    plan.save(folder / "plan.json")
    assert autoshard.Plan.load(folder / "plan.json") == plan

    # Why is this weight split as it is, and what does that cost?
    print(plan.explain("model.layers.*.mlp.down_proj.weight"))

    # What if the links were PCIe instead of NVLink?
    slower = autoshard.plan(model, world_size=8, args=args, kwargs=kwargs, hardware="l40s-pcie")
    print("\n".join(plan.diff(slower).splitlines()[:20]))

    # Or twice as fast? The step's time is a formula, so no new plan is needed to ask.
    moves = plan.sensitivity()
    print(f"links twice as fast: {1e3 * moves.at(bandwidth=2):.0f} ms a step")
    print(f"half the batch: {1e3 * moves.at(batch=0.5):.0f} ms a step")

    # Which numbers are there to work with?
    cost = plan.cost
    print(f"a step: {1e3 * cost.step_s:.0f} ms, of which {1e3 * cost.comm_s:.0f} ms communicate")
    print(f"a rank: {cost.memory.peak_bytes / 2**30:.1f} GiB at the peak")
    for name, other in cost.baselines.items():
        print(f"{name}: {other.step_s / cost.step_s:.2f}× the time")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
