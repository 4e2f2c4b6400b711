"""The naive trainer: one process, the whole batch, plain PyTorch. All other training is compared with it."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batch = TypeVar("Batch")


def train(
    model: torch.nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor],
    steps: int | None = None,
    scheduler: LRScheduler | None = None,
) -> list[float]:
    """Trains on one whole batch after the other, `steps` of them or all; returns the loss of every step.

    `loss(model, batch)` is the mean over the samples of the batch.
    """
    losses = []
    for batch in islice(batches, steps):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(value.item())
    return losses


def relative_difference(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """max |a - b| / max |b| for every tensor, in float64. Names and shapes must be the same on both sides."""
    if a.keys() != b.keys():
        raise ValueError(f"only one side has {sorted(a.keys() ^ b.keys())}")
    return {name: _relative(a[name], b[name]) for name in b}


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {list(a.shape)} and {list(b.shape)}")
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    wide_a, wide_b = _wide(a), _wide(b)
    largest = float(wide_b.abs().max())
    distance = float((wide_a - wide_b).abs().max())
    return distance / largest if largest else float("inf")


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
