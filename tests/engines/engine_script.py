"""What engines start in these tests: a small training with checkpoints, to which things happen at a step.

`--kill 1:12` has worker 1 kill itself after step 12, `--kill all:12` every worker. `--wait-at 12` has worker 0 write a
file `reached` after step 12 and wait for a file `go`. All of it only in a run that begins at step 0. `--pace-s 5` makes
each step after that take so long, for others to come, until there is a file `hurry`.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

NUM_STEPS = 48
SAVED_EVERY = 5


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="the folder that holds the checkpoints and the files of --wait-at")
    parser.add_argument("--kill", default="none:0")
    parser.add_argument("--wait-at", type=int)
    parser.add_argument("--pace-s", type=float, default=0.0)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    number, _, kill_at = arguments.kill.partition(":")
    stops = arguments.kill != "none:0" or arguments.wait_at is not None
    run = lockstep.start(lanes=6)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.replicate(model, optimizer)
    samples = TensorDataset(torch.randn(160, 12), torch.randint(0, 4, (160,)))
    loader = run.shard(DataLoader(samples, batch_size=28, shuffle=True))  # six batches, the last has 20
    began = run.checkpoints(arguments.folder / "checkpoints", every_steps=SAVED_EVERY, keep=3)
    run.print(f"begins at step {began}")
    for _ in run.epochs(NUM_STEPS // 6):
        for batch in loader:
            for x, y in run.lanes(batch):
                run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if began == 0 and stops:
                await_checkpoint(arguments.folder, run.step - 1)
            if run.step >= max(int(kill_at), arguments.wait_at or 0):
                pause(arguments)
            if began == 0 and run.step == int(kill_at) and number in ("all", str(run.rank)):
                os.kill(os.getpid(), signal.SIGKILL)
            if began == 0 and run.step == arguments.wait_at and run.rank == 0:
                wait_for_the_test(arguments.folder)
    run.print(f"step {run.step} digest {run.digest()}")


def await_checkpoint(folder: Path, step: int) -> None:
    """Checkpoints are written in the background, one after the other: else the load would decide which are there.

    That of a step is begun in the next one, so that of `step` is under way.
    """
    newest = step // SAVED_EVERY * SAVED_EVERY
    while newest and not (folder / "checkpoints" / f"step-{newest:08d}").exists():
        time.sleep(0.05)


def pause(arguments: argparse.Namespace) -> None:
    until_s = time.monotonic() + arguments.pace_s
    while time.monotonic() < until_s and not (arguments.folder / "hurry").exists():
        time.sleep(0.05)


def wait_for_the_test(folder: Path) -> None:
    (folder / "reached").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
