"""What a step costs beside its arithmetic, on one worker.

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py gpt10m

A model so small that its arithmetic takes no time: what is left is torch's own work for each operation, which all sides
have, and what each way to train adds. On a GPU such work is in the way wherever kernels are short. Each side is a
process of its own with one thread; blocks of steps take turns. Sides first show that they compute the same.
"""

import sys

from rich.console import Console

from lockstep.programs.bench.gpu.plan import DDP, DETERMINISTIC, FUSED, LOCKSTEP, NOT_EXACT, GpuStepPlan, show_row
from lockstep.programs.bench.gpu.turns import bench_gpu_steps
from lockstep.programs.bench.rounds import show_progress

SIZES = {
    "mlp": {"batch_size": 8, "width": 16},
    "gpt10m": {"batch_size": 2, "context": 4, "width": 24, "num_blocks": 12, "num_tokens": 16},
}
SIDES = (FUSED, DETERMINISTIC, DDP, LOCKSTEP, NOT_EXACT)


def main(model: str) -> None:
    plan = GpuStepPlan(model, 1, SIDES, steps=100, rounds=20, device="cpu", sizes=SIZES[model])
    console = Console()
    with show_progress(Console(stderr=True), [plan]) as follow:
        bench_gpu_steps([plan], follow, lambda row: show_row(row, console), {})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mlp")
