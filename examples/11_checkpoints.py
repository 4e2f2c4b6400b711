"""Checkpoints that take care of themselves: stop the run anywhere, start it again, and it goes on.

    python examples/11_checkpoints.py whole
    lockstep run -n 2 examples/11_checkpoints.py parts --stop-at 25
    lockstep run -n 3 examples/11_checkpoints.py parts

The argument is the folder of the checkpoints, one every ten steps, of which the newest two stay. The
second command leaves at step 25 without a word to anyone, as a crash would; the third goes on from step
20. Press Ctrl-C or kill it wherever you like instead. Look at the digests of the first and the last
command: they are equal. Remove the folders to start again.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def blobs(num_images: int) -> TensorDataset:
    """Noisy 8×8 images with one bright blob; the label is the quarter it is in."""
    label = torch.randint(0, 4, (num_images,))
    images = 0.5 * torch.randn(num_images, 1, 8, 8)
    for image, quarter in zip(images, label.tolist(), strict=True):
        top, left = 4 * (quarter // 2), 4 * (quarter % 2)
        image[0, top + 1 : top + 3, left + 1 : left + 3] += 1
    return TensorDataset(images, label)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(288, 4)
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder that holds the checkpoints, or will")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="leave after this step, saving nothing")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    run = lockstep.start(lanes=6)
    loader = run.shard(DataLoader(blobs(300), batch_size=32, shuffle=True))  # ten batches, the last has 12
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    run.replicate(model, optimizer, scheduler=scheduler)

    step = run.checkpoints(arguments.folder, every_steps=10, keep=2)  # the one line this example is about
    run.print(f"going on from step {step}")
    for epoch in run.epochs(4):
        for batch in loader:
            for x, y in run.lanes(batch):
                run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if run.step == arguments.stop_at:
                return
        run.print(f"epoch {epoch}  step {run.step}  loss {run.loss:.6f}")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
