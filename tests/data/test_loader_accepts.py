"""What can be sharded, and what is said about the rest."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from noisy_data import Noisy, sharded
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.errors import BadArgument


def test_what_is_no_data_loader_is_refused_with_the_other_way() -> None:
    with pytest.raises(BadArgument, match=r"takes a torch DataLoader, not an object of type list; .*run\.lanes"):
        sharded([torch.ones(2)])


def test_a_loader_that_iterates_in_its_own_way_is_refused() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            yield 1

    with pytest.raises(BadArgument, match="Own, a DataLoader that iterates in a way of its own"):
        sharded(Own(Noisy(2)))


@pytest.mark.parametrize("as_batches", [False, True])
def test_a_distributed_sampler_is_refused(as_batches: bool) -> None:
    sampler: Any = DistributedSampler(Noisy(4), num_replicas=2, rank=0)
    given = {"batch_sampler": torch.utils.data.BatchSampler(sampler, 2, False)} if as_batches else {"sampler": sampler}
    with pytest.raises(BadArgument, match="lockstep shards by itself: drop the sampler and use shuffle=True"):
        sharded(DataLoader(Noisy(4), **given))


OPTIONS = [name for name in inspect.signature(DataLoader).parameters if name != "shuffle"]


@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_user_reads_on_a_loader_still_reads_from_it(name: str) -> None:
    loader: DataLoader[Any] = DataLoader(
        Noisy(4), 2, num_workers=2, timeout=3, worker_init_fn=print, generator=torch.Generator(), prefetch_factor=3,
        persistent_workers=True, pin_memory_device="cuda", multiprocessing_context="fork",
    )  # fmt: skip
    assert getattr(sharded(loader), name) is getattr(loader, name)


def test_asking_for_batches_out_of_order_is_answered_that_they_come_in_order() -> None:
    said: list[str] = []
    sharded(DataLoader(Noisy(4), 2, in_order=False), say=said.append)
    assert ["in_order=False has no effect" in text for text in said] == [True]
