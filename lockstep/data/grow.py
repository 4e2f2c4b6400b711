"""How large a global batch is: one batch of the user's loader, split; or one of them for each lane.

# Note [Grown batches]
# With batch="grow" the order of an epoch's samples stays and only the cuts between global batches move: where
# the loader cuts every B samples, a run with V lanes cuts every B·V, and the share of a lane is B again. So
# all that depends on the epoch and the sample alone (order, augmentation) is that of batch="split"; what
# depends on the step (collating, the length of a pass) is that of a loader with batches of B·V.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lockstep.data.accept import is_stream
from lockstep.data.order import as_tuple

ADVICE = "learning rate and schedule are as you set them (see lockstep.optim.scale_lr)"


class Together:
    """Gives the indices of `num_batches` batches at a time, and at the end of those that are left."""

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

    See Note [Grown batches]. A batch sampler of the user's own decides on its batches by itself; so many of them are
    taken together.
    """
    batches: Any = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return DataLoader(loader.dataset, batch_sampler=Together(batches, num_lanes))
    sampler = None if is_stream(loader) else batches.sampler  # torch takes none for a stream
    return DataLoader(loader.dataset, batches.batch_size * num_lanes, sampler=sampler, drop_last=batches.drop_last)


def growth(whole: "DataLoader[Any]", num_lanes: int) -> str:
    """What the user should know about the batches of a loader that was grown."""
    if whole.batch_size is None:
        size = f"{_batches(whole.batch_sampler, num_lanes)} in a global batch, cut evenly by samples between the lanes"
    else:
        lanes = "the only lane" if num_lanes == 1 else f"each of {num_lanes} lanes"
        size = f"{_count(whole.batch_size // num_lanes, 'sample')} for {lanes}, {whole.batch_size} in a global batch"
    return f'batch="grow": {size}; {ADVICE}'


def _batches(sampler: Any, num_lanes: int) -> str:
    return f"{_count(num_lanes, 'batch', 'es')} of {type(sampler.batches).__name__}"


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else plural}"
