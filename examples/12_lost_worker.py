"""A worker that dies costs nothing: the others take its lanes, a new one takes its place, the bits stay.

    python examples/12_lost_worker.py
    lockstep run -n 3 examples/12_lost_worker.py --kill-at 20

It is the loop of 02_lockstep.py with dropout; nothing in it is about lost workers. Only for the show, worker 1
kills itself after step 20, by the signal that no process can catch. Look at the digests: both commands print the
same one. The line with "+" tells when the replacement has joined.
"""

import argparse
import os
import signal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def spirals(num_points: int) -> TensorDataset:
    """Points on three arms of a spiral, in random order; the label is the arm."""
    arm = torch.randint(0, 3, (num_points,))
    radius = torch.rand(num_points)
    angle = 4 * radius + 2.1 * arm + 0.2 * torch.randn(num_points)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="worker 1 kills itself after this step")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    run = lockstep.start(lanes=8)
    torch.manual_seed(0)
    model = network(512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.replicate(model, optimizer)
    loader = run.shard(DataLoader(spirals(8000), batch_size=384, shuffle=True))  # the last batch has 320

    for epoch in run.epochs(12):  # a replacement goes on in the epoch and at the batch where the others are
        for batch in loader:
            for x, y in run.lanes(batch):
                run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if run.step == arguments.kill_at and run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        run.print(f"epoch {epoch}  step {run.step}  loss {run.loss:.6f}")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
