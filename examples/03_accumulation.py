"""Gradient accumulation: a batch of 256 in forward passes of 16, by having more lanes than workers.

    python examples/03_accumulation.py
    lockstep run -n 2 examples/03_accumulation.py

There is no loss to divide and no step to skip: a worker computes its lanes one after the other, and
the optimizer, the clipping and the schedule see one gradient for each batch of 256. Look at the
forward passes, which stay at 16 samples, and at the digest, which is the same however many workers
share the lanes.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def noisy_waves(num_waves: int) -> TensorDataset:
    """Sine waves of one to five periods under noise; the label is the number of periods, from 0."""
    label = torch.randint(0, 5, (num_waves,))
    time = torch.linspace(0, 6.28, 64)
    phase = 6.28 * torch.rand(num_waves, 1)
    waves = torch.sin((label[:, None] + 1) * time + phase) + 0.5 * torch.randn(num_waves, 64)
    return TensorDataset(waves, label)


def main() -> None:
    run = lockstep.start(lanes=16)
    loader = run.shard(DataLoader(noisy_waves(1000), batch_size=256, shuffle=True))
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=8 * len(loader))
    run.replicate(model, optimizer, scheduler=scheduler)

    largest_forward = 0
    for epoch in run.epochs(8):
        for batch in loader:
            for x, y in run.lanes(batch):
                largest_forward = max(largest_forward, len(x))
                run.backward(F.cross_entropy(model(x), y))
            clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        run.print(f"epoch {epoch}  step {run.step}  loss {run.loss:.6f}")

    run.print(f"largest forward pass: {largest_forward} samples")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
