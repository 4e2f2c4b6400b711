"""What it costs to measure the noise of the gradient.

    lockstep run -n 2 benchmarks/noise_cost.py mlp
    lockstep run -n 2 benchmarks/noise_cost.py gpt 60

Steps in which squares are taken and steps in which they are not take turns in the same processes. The model's optimizer
is AdamW, so both kinds of squares are taken: plain, and as Adam sees them. The difference of each pair, spread over the
two hundred steps between two measurements, is what `noise_every=200` costs.
"""

import statistics
import sys
import time
from dataclasses import replace

import lockstep
from lockstep.gradients.squares import SquaresPlan
from lockstep.programs.bench.report import quantile
from lockstep.programs.bench.sides import LockstepSide, make_kit
from lockstep.programs.models import reference_workload

PAIRS = 200
EVERY = 200


def main(model: str, pairs: int) -> None:
    with lockstep.start(seed=0, noise_every=0) as run:
        side = LockstepSide(make_kit(reference_workload(model)), run)
        for number in range(10):
            side.step(number)
        engine = run._engine
        squares = {"with": SquaresPlan(1, run._noise.weigh), "without": SquaresPlan(0)}
        plans = {name: replace(engine._options, squares=plan) for name, plan in squares.items()}
        added, times = [], []
        for pair in range(pairs):
            taken = {}
            for name in ("with", "without") if pair % 2 else ("without", "with"):
                engine._options = plans[name]
                began_s = time.perf_counter()
                side.step(pair)
                taken[name] = time.perf_counter() - began_s
            added.append(taken["with"] / taken["without"] - 1)
            times.append(taken["without"])
        low, middle, high = (quantile(added, part) for part in (0.25, 0.5, 0.75))
        run.print(
            f"{model}: {statistics.median(times) * 1000:.1f} ms a step; a measured one takes {middle:.0%} longer "
            f"({low:.0%} to {high:.0%}, {pairs} pairs): {middle / EVERY:.2%} at every {EVERY}th step; "
            f"{run.noise.count} measurements"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mlp", int(sys.argv[2]) if len(sys.argv) > 2 else PAIRS)
