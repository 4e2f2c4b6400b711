"""Small training jobs for tests: what a user would write, on models and settings picked by name."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep
from lockstep.run.run import Run


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Convolutional(nn.Module):
    """BatchNorm, dropout and a draw of its own in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :12].view(-1, 3, 2, 2).repeat(1, 1, 2, 2)
        x = F.relu(self.norm(self.first(x)))
        x = F.dropout(F.relu(self.norm2(self.second(x))), 0.1, self.training)
        x = x + 0.01 * torch.randn(x.shape)
        return self.out(x.mean((2, 3)))


class Gpt(nn.Module):
    """Two attention blocks over the sign pattern of the input, embeddings tied to the output."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.place = nn.Parameter(torch.randn(12, width) * 0.02)
        self.register_buffer("mask", torch.full((12, 12), float("-inf")).triu(1))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x * 3).long().clamp(-3, 4) + 3
        h = self.embed(tokens) + self.place
        for block in self.blocks:
            h = block(h, src_mask=self.mask)
        return self.head(h)[:, -1, :5]


class PartlyUsed(nn.Module):
    """Parameters never used, used in some lanes only, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 16)
        self.sometimes = nn.Linear(16, 16)
        self.never = nn.Linear(7, 7)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.out = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.frozen(torch.tanh(self.body(x))))
        if x[0, 0] > 0:  # depends on the lane's data
            h = h + self.sometimes(h)
        return self.out(h)


class Noisy(Dataset):  # type: ignore[type-arg]
    """A map-style data set with a random augmentation."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(12), self.y[index]


MODELS = {"mlp": Mlp, "dropout": lambda: Mlp(0.3), "conv": Convolutional, "gpt": Gpt, "partly": PartlyUsed}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
}


@dataclass(frozen=True)
class Job:
    """A training by name; `epochs` of 173 samples in global batches of `batch`, the last one uneven."""

    model: str = "mlp"
    optimizer: str = "adamw"
    batch: int = 52
    epochs: int = 13
    augment: bool = False
    num_workers: int = 0
    autocast: bool = False
    double: bool = False


def data(double: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(173, 12, generator=g)
    return (x.double() if double else x), torch.randint(0, 5, (173,), generator=g)


def make(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(11)
    model = MODELS[job.model]()
    model = model.double() if job.double else model
    return model, OPTIMIZERS[job.optimizer]([p for p in model.parameters() if p.requires_grad])


def loader_of(job: Job) -> "DataLoader[Any]":
    kind = Noisy if job.augment else TensorDataset
    return DataLoader(kind(*data(job.double)), batch_size=job.batch, shuffle=True, num_workers=job.num_workers)


def train_epochs(run: Run, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for _ in run.epochs(job.epochs):
        for batch in loader:
            train_step(run, job, model, optimizer, batch)


def train_step(run: Run, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    for x, y in run.lanes(batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=job.autocast):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def digest_after(job: Job, lanes: int = 8, **options: Any) -> list[Any]:
    """Trains and gives [digest, number of steps]."""
    run = lockstep.start(lanes=lanes, seed=3, **options)
    model, optimizer = make(job)
    run.replicate(model, optimizer)
    train_epochs(run, job, model, optimizer, run.shard(loader_of(job)))
    return [run.digest(), run.step]
