"""A batch that grows with the lanes, and the rate that belongs to it: scaled, warmed up, then a cosine.

    python examples/15_grow.py
    lockstep run -n 2 examples/15_grow.py

The script was tuned for batches of 32. With batch="grow" each of 8 lanes has 32 samples, so a batch
has 256 and an epoch an eighth of the steps. lockstep changes no rate by itself: `scale_lr` does, and
says so; `check` looks for what is often forgotten. Look at the line of scale_lr, at what check finds
before and after, and at the digest: it is the same on any number of workers, since 8 lanes are 8 lanes.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.optim import WarmUp, check, exclude_biases_and_norms, scale_lr

TUNED_FOR = 32
NUM_EPOCHS = 12


def spirals(num_points: int) -> TensorDataset:
    """Points on three arms of a spiral, in random order; the label is the arm."""
    arm = torch.randint(0, 3, (num_points,))
    radius = torch.rand(num_points)
    angle = 4 * radius + 2.1 * arm + 0.2 * torch.randn(num_points)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def main() -> None:
    run = lockstep.start(lanes=8)
    torch.manual_seed(0)
    loader = run.shard(DataLoader(spirals(2048), batch_size=TUNED_FOR, shuffle=True), batch="grow")
    model = network()
    optimizer = torch.optim.SGD(exclude_biases_and_norms(model, 1e-4), lr=0.02, momentum=0.9)
    run.print(scale_lr(optimizer, batch=loader.batch_size, base_batch=TUNED_FOR))
    for finding in check(model, optimizer, num_lanes=8, batch=loader.batch_size):
        run.print(f"before: {finding}")

    warm, total = 2 * len(loader), NUM_EPOCHS * len(loader)
    parts = [WarmUp(optimizer, steps=warm), CosineAnnealingLR(optimizer, T_max=total - warm)]
    scheduler = SequentialLR(optimizer, parts, milestones=[warm])
    findings = check(model, optimizer, num_lanes=8, batch=loader.batch_size, scheduler=scheduler)
    run.print(f"findings with the schedule: {len(findings)}")
    run.replicate(model, optimizer, scheduler=scheduler)

    for epoch in run.epochs(NUM_EPOCHS):
        for batch in loader:
            for x, y in run.lanes(batch):
                run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        run.print(f"epoch {epoch}  rate {optimizer.param_groups[0]['lr']:.4f}  loss {run.loss:.6f}")

    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
