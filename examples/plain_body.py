"""The loop of 01_plain.py with its body as it was: run.steps hands out lanes, and makes the update after each batch.

    python examples/plain_body.py
    lockstep run -n 2 examples/plain_body.py

Look at the losses: those of 02_lockstep.py, to the last digit, on any number of workers. Eight lines are new.
"""

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


def main() -> None:
    run = lockstep.start(lanes=8)
    torch.manual_seed(0)
    train, test = spirals(1000), spirals(300)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    run.replicate(model, optimizer)
    loader = run.shard(DataLoader(train, batch_size=96))  # the last batch has 40

    for epoch in run.epochs(6):
        for x, y in run.steps(loader):
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.print(f"epoch {epoch}  loss of the last batch {run.loss:.6f}")

    points, arms = test.tensors
    print(f"right on {int((model(points).argmax(1) == arms).sum())} of {len(test)} new points")


if __name__ == "__main__":
    main()
