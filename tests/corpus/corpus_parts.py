"""What the scripts of the corpus have in common: a small data set, a small model, and a loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
STEPS = 6  # an epoch: 90 samples in batches of 16, the last of 10


def samples(num_samples: int = 90) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_samples, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (num_samples,), generator=generator))


def plain_loader(**options: object) -> DataLoader:
    return DataLoader(samples(), **{"batch_size": 16, "shuffle": True, **options})


def network(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 3))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)
