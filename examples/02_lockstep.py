"""The plain loop of 01_plain.py on any number of workers: compare the two files, a dozen lines differ.

    python examples/02_lockstep.py
    lockstep run -n 2 examples/02_lockstep.py

Look at the digest: it covers every bit of the model and the optimizer, and is the same on 1, 2, 3
or 8 workers. The losses are those of 01_plain.py, to rounding.
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
        for batch in loader:
            for x, y in run.lanes(batch):
                loss = F.cross_entropy(model(x), y)
                run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.print(f"epoch {epoch}  loss of the last batch {run.loss:.6f}")

    points, arms = test.tensors
    run.print(f"right on {int((model(points.to(run.device)).argmax(1).cpu() == arms).sum())} of {len(test)} new points")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
