"""A small model on a GPU: whole lanes and the update as CUDA graphs.

    python examples/17_captured.py
    lockstep run -n 2 examples/17_captured.py            # workers may share a GPU
    lockstep run -n 2 --device cpu examples/17_captured.py

A small model spends its time in starting kernels, not in running them. `run.captured` records the
work of a lane once and replays it: one start instead of hundreds. What is recorded must not look at
values (no `loss.item()` inside), and its Python runs only while it is recorded. On the CPU the function
runs as it is, and a note says so. Look at the digest: captured or not, on any number of workers of one
kind of device, it is the same.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def spirals(num_points: int) -> TensorDataset:
    """Points on two spirals, and on which one they are."""
    which = torch.randint(0, 2, (num_points,))
    angle = 6 * torch.rand(num_points)
    turned = angle + torch.pi * which
    return TensorDataset(torch.stack([angle * turned.cos(), angle * turned.sin()], 1) / 6, which)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plain", action="store_true", help="without graphs")
    return parser.parse_args()


def main() -> None:
    run = lockstep.start(lanes=2)
    loader = run.shard(DataLoader(spirals(640), batch_size=64, shuffle=True))
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(2, 64), *layers, nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, capturable=run.device.type == "cuda")
    run.replicate(model, optimizer)

    def lane(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        run.backward(loss)
        return loss

    compute = lane if parse().plain else run.captured(lane, optimizer)
    for epoch in run.epochs(4):
        for batch in loader:
            for x, y in run.lanes(batch):
                compute(x, y)
            optimizer.step()
            optimizer.zero_grad()
        run.print(f"epoch {epoch}  loss {run.loss:.6f}")

    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
