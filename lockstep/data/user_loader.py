"""The user's DataLoader: whether it can be sharded, and how large its global batches are.

# Note [Grown batches]
# With batch="grow" the order of an epoch's samples stays and only the cuts between global batches move: where
# the loader cuts every B samples, a run with V lanes cuts every B·V, and the share of a lane is B again. So
# all that depends on the epoch and the sample alone (order, augmentation) is that of batch="split"; what
# depends on the step (collating, the length of a pass) is that of a loader with batches of B·V.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lockstep.data.order import as_tuple
from lockstep.errors import BadArgument

SPLIT, GROW = "split", "grow"

ADVICE = "learning rate and schedule are as you set them (see lockstep.optim.scale_lr)"


def accepted(loader: Any, batch: Any = SPLIT) -> "DataLoader[Any]":
    """The loader itself; raises if it cannot be sharded, or its batches cannot be made global ones as `batch` asks."""
    if not isinstance(loader, DataLoader):
        raise BadArgument(
            f"run.shard takes a torch DataLoader, not {_named(loader)}; "
            "any other source can be passed to run.lanes(batch) directly, one whole batch at a time."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise BadArgument(
            f"run.shard was given {_named(loader)}, a DataLoader that iterates in a way of its own; sharding "
            "would bypass it. Use a plain DataLoader, or iterate it yourself and pass each whole batch to "
            "run.lanes(batch)."
        )
    if not isinstance(batch, str) or batch not in (SPLIT, GROW):
        raise BadArgument(
            f'run.shard takes batch="{SPLIT}" (a batch of the loader is a global batch, split between the lanes) or '
            f'batch="{GROW}" (every lane has a batch of its own of that size), not batch={batch!r}'
        )
    if batch == GROW and loader.batch_sampler is None:
        raise BadArgument(
            f'run.shard(loader, batch="{GROW}") gives every lane a batch of the loader, and this one has none: with '
            "batch_size=None each item of the data set is a whole global batch already. Give the DataLoader a "
            f'batch_size, or leave batch="{GROW}" out.'
        )
    return loader


def is_stream(loader: "DataLoader[Any]") -> bool:
    return isinstance(loader.dataset, IterableDataset)


def notes(loader: "DataLoader[Any]") -> list[str]:
    """What the user should know about how this loader will be read."""
    texts = []
    if is_stream(loader) and loader.num_workers > 1:
        texts.append(
            f"the data set {type(loader.dataset).__name__} is a stream: every worker reads all of it, in one "
            f"loading process instead of {loader.num_workers}, so that its samples come in one order"
        )
    if not getattr(loader, "in_order", True):
        texts.append("in_order=False has no effect: batches come in order, the same on every worker")
    return texts


class GroupedBatches:
    """A batch sampler that joins the indices of `num_batches` batches, and at the end of those that are left."""

    def __init__(self, batches: Iterable[Any], num_batches: int) -> None:
        self.batches = batches
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[list[Any]]:
        together: list[Any] = []
        for number, batch in enumerate(self.batches, start=1):
            together.extend(as_tuple(batch))
            if number % self.num_batches == 0:
                yield together
                together = []
        if together:
            yield together

    def __len__(self) -> int:
        num_given: int = len(self.batches)  # type: ignore[arg-type]  # raises where the sampler knows none, as in torch
        return -(-num_given // self.num_batches)


def grown(loader: "DataLoader[Any]", num_lanes: int) -> "DataLoader[Any]":
    """A loader with `num_lanes` times as large batches: for its sizes, its order and its length, not to be iterated.

    See Note [Grown batches]. Of a batch sampler of the user's own, `num_lanes` batches are joined.
    """
    batches: Any = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return DataLoader(loader.dataset, batch_sampler=GroupedBatches(batches, num_lanes))
    sampler = None if is_stream(loader) else batches.sampler  # torch takes none for a stream
    return DataLoader(loader.dataset, batches.batch_size * num_lanes, sampler=sampler, drop_last=batches.drop_last)


def growth_note(whole: "DataLoader[Any]", num_lanes: int) -> str:
    """What the user should know about the batches of a loader that was grown."""
    if whole.batch_size is None:
        batches: Any = whole.batch_sampler
        kind = f"{_count(num_lanes, 'batch', 'es')} of {type(batches.batches).__name__}"
        size = f"{kind} in a global batch, cut evenly by samples between the lanes"
    else:
        lanes = "the only lane" if num_lanes == 1 else f"each of {num_lanes} lanes"
        size = f"{_count(whole.batch_size // num_lanes, 'sample')} for {lanes}, {whole.batch_size} in a global batch"
    return f'batch="grow": {size}; {ADVICE}'


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else plural}"


def _named(thing: Any) -> str:
    return f"an object of type {type(thing).__name__}"
