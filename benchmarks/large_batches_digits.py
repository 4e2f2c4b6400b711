"""The data and the network of the benchmarks on large batches: scikit-learn's digits and a small convolutional net."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_TRAIN = 1437
NUM_TEST = 360


@dataclass(frozen=True)
class Digits:
    """Images of 8 × 8 with their labels: those to train on, and those to judge by, which are never trained on."""

    images: Tensor
    labels: Tensor
    judged_images: Tensor
    judged_labels: Tensor


def digits() -> Digits:
    """1,437 images to train on and 360 to test with: always the same split, standardised by the training images."""
    from sklearn.datasets import load_digits  # here, so that the rest can be imported without scikit-learn

    found = load_digits()
    order = torch.randperm(NUM_TRAIN + NUM_TEST, generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.data, dtype=torch.float32).view(-1, 1, 8, 8)[order]
    labels = torch.tensor(found.target)[order]
    images = (images - images[:NUM_TRAIN].mean()) / images[:NUM_TRAIN].std()
    return Digits(images[:NUM_TRAIN], labels[:NUM_TRAIN], images[NUM_TRAIN:], labels[NUM_TRAIN:])


def without_test(data: Digits) -> Digits:
    """The training images alone, the last 360 of them to judge by: what rates are chosen with."""
    cut = len(data.labels) - NUM_TEST
    return Digits(data.images[:cut], data.labels[:cut], data.images[cut:], data.labels[cut:])


def network() -> nn.Module:
    """Two convolutions and two linear layers, 21,594 parameters.

    GroupNorm and not BatchNorm: its statistics are those of one image, so that the batch changes the gradient's noise
    and the number of steps, and nothing else.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def order_of(num_samples: int, epochs: int, seed: int) -> Tensor:
    """Every epoch in an order of its own, one behind the other: a batch may reach over the border between two."""
    chance = torch.Generator().manual_seed(seed)
    return torch.cat([torch.randperm(num_samples, generator=chance) for _ in range(epochs)])


@torch.no_grad()
def loss_on(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float(F.cross_entropy(model(images), labels))


@torch.no_grad()
def percent_right(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return 100 * float((model(images).argmax(1) == labels).float().mean())
