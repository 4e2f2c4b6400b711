"""Batch norm over the whole global batch, beside ordinary batch norm over each worker's part of it.

    python examples/06_sync_batchnorm.py
    lockstep run -n 2 examples/06_sync_batchnorm.py

Three copies of one network are trained: one without lockstep on the whole batch, one with
`sync_batchnorm`, one with ordinary batch norm. Look at the distances from the first: the
synchronised copy stays with it, to rounding; the ordinary one leaves it as soon as there are two
workers. Synchronised batch norm needs one lane per worker, so the number of lanes, and with it the
last bits, follows the number of workers here.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import lockstep

NUM_STEPS = 20


def blinking_images(num_images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Small images whose brightness drifts from the first to the last; the label is the brighter half."""
    label = torch.randint(0, 2, (num_images,))
    images = torch.randn(num_images, 1, 8, 8) + torch.linspace(-2, 2, num_images).view(-1, 1, 1, 1)
    images[label == 0, :, :, :4] += 1
    images[label == 1, :, :, 4:] += 1
    return images, label


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train_alone(model: nn.Module, images: torch.Tensor, label: torch.Tensor) -> None:
    optimizer = sgd(model)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(images), label).backward()
        optimizer.step()


def distance(model: nn.Module, other: nn.Module) -> float:
    """The largest difference between two parameters or running statistics."""
    theirs = other.state_dict()
    return max(float((value - theirs[name]).abs().max()) for name, value in model.state_dict().items())


def main() -> None:
    run = lockstep.start()  # as many lanes as workers
    images, label = (tensor.to(run.device) for tensor in blinking_images(60))
    alone = network().to(run.device)
    ordinary = copy.deepcopy(alone)
    synchronised = lockstep.sync_batchnorm(copy.deepcopy(alone))
    optimizers = [sgd(ordinary), sgd(synchronised)]
    run.replicate(ordinary, optimizers[0])
    run.replicate(synchronised, optimizers[1])

    train_alone(alone, images, label)
    for _ in range(NUM_STEPS):
        for x, y in run.lanes((images, label)):
            F.cross_entropy(ordinary(x), y).backward()
            F.cross_entropy(synchronised(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    run.print(f"after {NUM_STEPS} steps, largest distance from the network trained alone on the whole batch")
    run.print(f"synchronised  {distance(synchronised, alone):.1e}")
    run.print(f"ordinary      {distance(ordinary, alone):.1e}")


if __name__ == "__main__":
    main()
