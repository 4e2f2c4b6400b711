"""Fabric: `strategy="lockstep"`, and one line in the loop.

    python examples/22_fabric.py
    lockstep run -n 3 examples/22_fabric.py

Needs `pip install "torch-lockstep[lightning]"`. `fabric.setup` makes model and optimizer the run's,
`fabric.setup_dataloaders` its loaders. Look at the digest: the same on any number of workers.
"""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
import lockstep.integrations.lightning  # knows the name "lockstep" from now on


def noisy_waves(num_waves: int) -> TensorDataset:
    """Sine waves of one to five periods under noise; the label is the number of periods, from 0."""
    label = torch.randint(0, 5, (num_waves,))
    time = torch.linspace(0, 6.28, 64)
    phase = 6.28 * torch.rand(num_waves, 1)
    return TensorDataset(torch.sin((label[:, None] + 1) * time + phase) + 0.5 * torch.randn(num_waves, 64), label)


def main() -> None:
    run = lockstep.start(lanes=4)
    fabric = Fabric(strategy="lockstep", precision="bf16-mixed")
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 5))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(noisy_waves(140), batch_size=32, shuffle=True))

    for epoch in run.epochs(3):
        for batch in loader:
            for x, y in run.lanes(batch):  # the one line
                loss = F.cross_entropy(model(x), y)
                fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        fabric.print(f"epoch {epoch}  step {run.step}  loss {run.loss:.6f}")

    fabric.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
