"""A small residual network on large batches with LARS: a rate for every tensor, and a warm-up.

    python examples/13_lars.py
    lockstep run -n 2 examples/13_lars.py

Three lines are about the large batch: `exclude_biases_and_norms` keeps decay and adaptation away from
biases and norms, LARS gives every other tensor a rate that fits its size, WarmUp raises the rate over
the first epoch. LARS never communicates: it sees the step's gradient, the same on every worker.
Look at the digest, which is the same on any number of workers.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.optim import LARS, WarmUp, exclude_biases_and_norms

NUM_EPOCHS = 5


def stripes(num_images: int) -> TensorDataset:
    """Images of stripes under noise, in four directions and any phase; the label is the direction."""
    label = torch.randint(0, 4, (num_images,))
    angle = (label * torch.pi / 4).view(-1, 1, 1)
    row, column = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    phase = 6.28 * torch.rand(num_images, 1, 1)
    waves = torch.sin(1.5 * (row * angle.cos() + column * angle.sin()) + phase)
    return TensorDataset((waves + torch.randn(num_images, 8, 8)).unsqueeze(1), label)


class Residual(nn.Module):
    """Two convolutions with batch norm, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.first_norm(self.first(images)))
        return F.relu(images + self.second_norm(self.second(inner)))


def network() -> nn.Module:
    stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
    body = [Residual(16), nn.AvgPool2d(2), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(stem, nn.BatchNorm2d(16), nn.ReLU(), *body, nn.Linear(16, 4))


def main() -> None:
    run = lockstep.start(lanes=8)
    torch.manual_seed(0)
    loader = run.shard(DataLoader(stripes(2048), batch_size=256, shuffle=True))  # 32 in a lane
    model = network()
    optimizer = LARS(exclude_biases_and_norms(model, weight_decay=1e-4), lr=1.0, trust_coefficient=0.02)
    scheduler = WarmUp(optimizer, epochs=1, steps_per_epoch=len(loader), start=0.1)
    run.replicate(model, optimizer, scheduler=scheduler)

    for epoch in run.epochs(NUM_EPOCHS):
        for batch in loader:
            for x, y in run.lanes(batch):
                run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        run.print(f"epoch {epoch}  rate {optimizer.param_groups[0]['lr']:.2f}  loss {run.loss:.6f}")

    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
