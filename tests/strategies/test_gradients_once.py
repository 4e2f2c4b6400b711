"""Under "gradients" and "parameters" the sum of the gradients stands once on a host, with the bits of `replicated`."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import Convolutional, Gpt
from workers import on_workers

import lockstep
from lockstep.run.run import Run

BATCHES = [
    (torch.randn(21, 12, generator=g), torch.randint(0, 5, (21,), generator=g))
    for g in map(torch.Generator().manual_seed, range(4))
]


WIDTH = 520
"""A square layer of this width has a bucket of its own."""


class Branched(nn.Module):
    """Each lane reaches one of two branches, and no lane the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))) for _ in range(2))
        self.first, self.last, self.never = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.branches[int(x[0, 0] > 0)](self.first(x))))
        return out


class Layers(nn.Module):
    """More layers than lent buffers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        sizes = [12, WIDTH, WIDTH, WIDTH, WIDTH, 5]
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.layers[0].weight.dtype)  # type: ignore[arg-type]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float()


def _lag(run: Run) -> None:
    """Worker 1 is late, so that the others are ahead of it by as many buckets as they may."""
    if run.rank == 1:
        torch.ones(1200, 1200) @ torch.ones(1200, 1200)


Learn = Callable[[Run, nn.Module, torch.optim.Optimizer, Any], None]


def _plain(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    for x, y in run.lanes(batch):
        _lag(run)
        run.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


def _weighted(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """By a weight that is known at the end, so that the sum is scaled."""
    for x, y in run.lanes(batch):
        run.backward(F.cross_entropy(model(x), y), weight=float(y.sum()) + 1)
    optimizer.step()
    optimizer.zero_grad()


def _accumulated(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Two loops for each update, and gradients that are zero instead of None afterwards."""
    for _ in range(2):
        for x, y in run.lanes(batch):
            run.backward(F.cross_entropy(model(x), y))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.7)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def _twice_in_a_lane(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    for x, y in run.lanes(batch):
        with run.no_sync():
            F.cross_entropy(model(x), y).backward()
            model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _half() -> Layers:
    return Layers(torch.bfloat16)


CASES: dict[str, tuple[Callable[[], nn.Module], Learn, dict[str, Any]]] = {
    "layers": (Layers, _plain, {}),
    "weighted": (Layers, _weighted, {}),
    "accumulated": (Layers, _accumulated, {}),
    "twice": (Layers, _twice_in_a_lane, {}),
    "added in float32": (_half, _weighted, {"reduce_dtype": torch.float32}),
    "branched": (Branched, _plain, {}),
    "gpt": (Gpt, _plain, {}),
    "conv": (Convolutional, _plain, {}),
}


def _digests(strategy: str) -> dict[str, str]:
    return {name: _digest(strategy, *case) for name, case in CASES.items()}


def _digest(strategy: str, make: Callable[[], nn.Module], learn: Learn, options: dict[str, Any]) -> str:
    with lockstep.start(lanes=4, seed=1, strategy=strategy, bucket_bytes=2**20, **options) as run:
        torch.manual_seed(3)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        run.replicate(model, optimizer)
        for batch in BATCHES:
            learn(run, model, optimizer, batch)
        return run.digest()


@pytest.fixture(scope="module")
def replicated() -> dict[str, str]:
    digests: dict[str, str] = on_workers(1, _digests, "replicated")[0]
    assert len(set(digests.values())) == len(digests)
    return digests


@pytest.mark.parametrize("num_workers", [1, 3, *(pytest.param(more, marks=pytest.mark.soak) for more in (2, 4))])
def test_whatever_lanes_reach_and_weigh_the_digest_is_that_of_replicated(
    replicated: dict[str, str], num_workers: int
) -> None:
    """On three workers one has two lanes; on four all have one, and their buckets take turns in two buffers."""
    for found in on_workers(num_workers, _digests, "sharded:gradients"):
        assert found == replicated


def _gradient_of_one_step(run: Run, width: int) -> torch.Tensor:
    """Of a square layer without a bias."""
    model = nn.Linear(width, width, bias=False)
    run.replicate(model, torch.optim.SGD(model.parameters(), 0.1))
    for x in run.lanes(torch.ones(8, width)):
        run.backward(model(x).sum())
    assert model.weight.grad is not None
    return model.weight.grad


def _gradient_after_a_write() -> list[float]:
    """The first elements of the gradient, when worker 0 has changed its own."""
    with lockstep.start(lanes=2, seed=1, strategy="sharded:gradients") as run:
        gradient = _gradient_of_one_step(run, 64)
        if run.rank == 0:
            gradient[0, 0] = 7.0
        run.total(0.0)
        found: list[float] = gradient[0, :2].tolist()
        return found


def test_what_one_worker_writes_to_its_gradient_no_other_sees() -> None:
    changed, other = on_workers(2, _gradient_after_a_write)
    assert changed == [7.0, other[1]]
    assert other[0] == other[1]


def _versions_around_clipping() -> tuple[int, int, float]:
    """How often the gradient was written before and after it was clipped to more than its norm."""
    with lockstep.start(lanes=2, strategy="sharded:gradients") as run:
        gradient = _gradient_of_one_step(run, 4)
        before = gradient._version
        norm = float(run.clip_grad_norm_(1e6))
        return before, gradient._version, norm


def test_a_gradient_that_is_short_enough_is_not_written_to() -> None:
    for before, after, norm in on_workers(2, _versions_around_clipping):
        assert (after, norm) == (before, 16.0)  # sixteen elements of 4
