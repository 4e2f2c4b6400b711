"""What it brings that lanes move away from a slow worker: three workers, of which one has half the speed.

    python benchmarks/rebalance.py          # both sides, in turns, each a whole launch
    lockstep run -n 3 --no-rebalance benchmarks/rebalance.py one

Worker 2 shares its core with a process that computes for ever, so the kernel gives it half of that core. Steps are
counted after lanes have had the time to move; throughput is that of the run, and the digests must be equal. The ratio
is that of a pair of launches in changing order. It needs four cores: on fewer, every worker is slow.
"""

import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

import lockstep
from lockstep.programs.models import make_mlp

NUM_LANES = 12
WARM_UP, NUM_STEPS = 150, 100
ROUNDS = 3


def compute_for_ever() -> None:
    while True:
        pass


@contextmanager
def half_a_core() -> Iterator[None]:
    """This process keeps to one core, on which another one computes too."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    other = multiprocessing.get_context("fork").Process(target=compute_for_ever, daemon=True)
    other.start()
    yield
    other.kill()
    other.join()


def train() -> None:
    with lockstep.start(lanes=NUM_LANES, seed=0) as run:
        model = make_mlp(width=512)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        run.replicate(model, optimizer)
        batch = torch.randn(NUM_LANES * 64, 512)
        began_s = 0.0
        with half_a_core() if run.rank == 2 else nullcontext():
            while run.step < WARM_UP + NUM_STEPS:
                if run.step == WARM_UP:
                    began_s = time.perf_counter()
                for x in run.lanes(batch):
                    run.backward(model(x).square().mean())
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
    pairs = sorted(a / b for a, b in zip(taken["--rebalance"], taken["--no-rebalance"], strict=True))
    spread = f"{pairs[0]:.2f} to {pairs[-1]:.2f}, {ROUNDS} pairs"
    print(f"with ÷ without {statistics.median(pairs):.2f} ({spread}); one digest, {digests.pop()[:16]}")


if __name__ == "__main__":
    train() if sys.argv[1:] == ["one"] else main()
