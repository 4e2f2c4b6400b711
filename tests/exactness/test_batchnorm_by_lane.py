"""BatchNorm with the statistics of a lane: small last batches train, and it is said how few samples it sees."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workers import on_workers

import lockstep
from lockstep.events import Note, StepCommitted

NUM_SAMPLES, BATCH, LANES = 103, 20, 8


def data(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(num_samples, 6, generator=g), torch.randint(0, 3, (num_samples,), generator=g))


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return model, torch.optim.SGD(model.parameters(), 0.05)


def train(lanes: int = LANES, *, shard_first: bool = False, own_batches: bool = False, sync: bool = False) -> list[Any]:
    """Digest, samples trained on, what was said."""
    run = lockstep.start(lanes=lanes, seed=4)
    found: list[Any] = ["", 0, []]
    run._events.subscribe(lambda event: _note(event, found))
    model, optimizer = model_and_optimizer()
    loader = DataLoader(data(), BATCH)
    batches: Any = run.shard(loader) if shard_first else None
    run.replicate(lockstep.sync_batchnorm(model) if sync else model, optimizer)
    batches = loader if own_batches else (batches or run.shard(loader))
    for _ in range(2):
        for batch in batches:
            for x, y in run.lanes(batch):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [run.digest(), *found[1:]]


def _note(event: object, found: list[Any]) -> None:
    if isinstance(event, StepCommitted):
        found[1] += event.num_samples
    if isinstance(event, Note):
        found[2].append(event.text)


def plain() -> nn.Module:
    """What everyone writes."""
    model, optimizer = model_and_optimizer()
    for _ in range(2):
        for x, y in DataLoader(data(), BATCH):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_a_last_batch_of_three_trains_on_eight_lanes_to_the_same_bits_on_any_number_of_workers() -> None:
    found = [on_workers(size, train) for size in (1, 2, 3)]
    assert len({worker[0] for workers in found for worker in workers}) == 1
    assert {worker[1] for workers in found for worker in workers} == {2 * NUM_SAMPLES}


def test_neither_the_order_of_calls_nor_the_source_of_batches_matters() -> None:
    ((wanted, *_),) = on_workers(1, train)
    ((shard_first, *_),) = on_workers(1, train, shard_first=True)
    ((own_batches, *_),) = on_workers(2, train, own_batches=True)[:1]
    assert shard_first == own_batches == wanted


def test_one_lane_is_the_plain_loop() -> None:
    torch.set_num_threads(1)
    with lockstep.start(lanes=1, seed=4) as run:
        model, optimizer = model_and_optimizer()
        run.replicate(model, optimizer)
        loader = run.shard(DataLoader(data(), BATCH))
        for _ in range(2):
            for batch in loader:
                for x, y in run.lanes(batch):
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain().parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def norms(said: list[str]) -> list[str]:
    return [text for text in said if "BatchNorm" in text]


def test_it_is_said_once_by_worker_0_how_many_samples_batchnorm_sees() -> None:
    first, *others = [norms(said) for _, _, said in on_workers(2, train)]
    (text,) = first
    assert text.startswith("BatchNorm sees the 3 samples of a lane, not the 20 of the batch; what to do")
    assert others == [[]]


def small_batches() -> list[str]:
    run = lockstep.start(lanes=LANES, seed=4)
    found: list[Any] = ["", 0, []]
    run._events.subscribe(lambda event: _note(event, found))
    model, optimizer = model_and_optimizer()
    run.replicate(model, optimizer)
    for x, y in run.lanes(data(9)[:]):
        F.cross_entropy(model(x), y).backward()
    return found[2]


def test_it_is_said_where_batches_are_so_small_that_some_lanes_have_none() -> None:
    (said,) = on_workers(1, small_batches)
    assert "the 3 samples of a lane, not the 9 of the batch, which 4 of 8 lanes share" in norms(said)[0]


@pytest.mark.parametrize(("num_workers", "options"), [(1, {"lanes": 1}), (2, {"lanes": 2, "sync": True})])
def test_nothing_is_said_with_one_lane_or_with_statistics_of_the_whole_batch(num_workers: int, options: Any) -> None:
    assert [norms(said) for _, _, said in on_workers(num_workers, train, **options)] == [[]] * num_workers
