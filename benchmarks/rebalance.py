"""What it brings that lanes move away from a slow worker: three workers, of which one has half the speed.

    python benchmarks/rebalance.py          # both sides, in turns, each a whole launch
    lockstep run -n 3 --no-rebalance benchmarks/rebalance.py one

Worker 2 computes, after each of its lanes, as long again as the lane took. Steps are counted after lanes have had the
time to move; throughput is that of the run, and the digests must be equal.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time

import torch

import lockstep
from lockstep.programs.models import make_mlp

NUM_LANES = 12
WARM_UP, NUM_STEPS = 150, 100
ROUNDS = 3


def burn(seconds: float) -> None:
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


def train() -> None:
    with lockstep.start(lanes=NUM_LANES, seed=0) as run:
        model = make_mlp(width=512)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        run.replicate(model, optimizer)
        batch = torch.randn(NUM_LANES * 64, 512)
        began_s = 0.0
        while run.step < WARM_UP + NUM_STEPS:
            if run.step == WARM_UP:
                began_s = time.perf_counter()
            for x in run.lanes(batch):
                lane_began_s = time.perf_counter()
                run.backward(model(x).square().mean())
                if run.rank == 2:
                    burn(time.perf_counter() - lane_began_s)
            optimizer.step()
            optimizer.zero_grad()
        took_s = time.perf_counter() - began_s
        lanes = ", ".join(str(len(lanes)) for lanes in run.guard.generation.assignment.lanes_of)
        run.print(f"steps_per_s {NUM_STEPS / took_s:.2f} lanes {lanes} digest {run.digest()}")


def launch(option: str) -> tuple[float, str, str]:
    """Steps per second, the lanes of the workers at the end, and the digest."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "lockstep", "run", "-n", "3", "--device", "cpu", option, "--run-dir", folder]
        shown = subprocess.run([*words, __file__, "one"], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"steps_per_s ([\d.]+) lanes (.*) digest ([0-9a-f]{64})", shown)
    assert found is not None, shown
    return float(found[1]), found[2], found[3]


def main() -> None:
    taken: dict[str, list[float]] = {"--no-rebalance": [], "--rebalance": []}
    digests = set()
    for round in range(ROUNDS):
        for option in sorted(taken, reverse=bool(round % 2)):
            steps_per_s, lanes, digest = launch(option)
            taken[option].append(steps_per_s)
            digests.add(digest)
            print(f"{option:<15} {steps_per_s:.2f} steps/s, lanes {lanes}", flush=True)
    assert len(digests) == 1, digests
    ratio = statistics.median(taken["--rebalance"]) / statistics.median(taken["--no-rebalance"])
    print(f"with ÷ without {ratio:.2f}; one digest, {digests.pop()[:16]}")


if __name__ == "__main__":
    train() if sys.argv[1:] == ["one"] else main()
