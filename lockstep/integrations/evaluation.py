"""An evaluation that a trainer makes between steps, divided over the workers.

# Note [Divided evaluation]
# Each batch is loaded and computed by one worker, as a whole and with random numbers of its own key: what it comes to
# does not depend on the worker. Then all workers exchange what they have, and each has everything, in the order of the
# data. If a worker is lost, the others need not agree on anything: each computes by itself what it has not got, and the
# loss is dealt with in the next step. A generation in which an exchange has failed has no further one, since others may
# still wait in the one that failed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.chance import Generators, fold, set_generators
from lockstep.errors import WorkerLost
from lockstep.run.run import Run
from lockstep.state.snapshot import Tensors, from_bytes, pack, to_bytes, unpack

Compute = Callable[[Any], Any]
"""From a batch to what it comes to: tensors, numbers, strings, None, and dicts, lists and tuples of them."""


@dataclass(frozen=True)
class KeyedBatches(Dataset[Any]):
    """The batches of a loader by their numbers, each loaded with random numbers of its own key."""

    dataset: Any
    collate: Callable[[Any], Any]
    indices: Sequence[Any]
    key: int

    def __getitem__(self, number: int) -> Any:
        set_generators(fold(self.key, "load", number))
        wanted = self.indices[number]
        several = getattr(self.dataset, "__getitems__", None)
        return self.collate([self.dataset[index] for index in wanted] if several is None else several(wanted))


class Division:
    """Divides evaluations of one run over its workers. See Note [Divided evaluation]."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._made_at, self._num_made = -1, 0
        self._failed_in = 0

    def over_workers(self, loader: "DataLoader[Any]", compute: Compute) -> list[Any]:
        """Collective. What every batch of the loader comes to, in order, the same everywhere. Tensors go to the CPU."""
        world, outside = self._run.guard.generation.world, Generators.now()
        batches = KeyedBatches(loader.dataset, loader.collate_fn, list(loader.batch_sampler or ()), self._next_key())
        numbers = range(len(batches.indices))
        try:
            found = self._computed(loader, batches, numbers[world.rank :: world.size], compute)
            if self._failed_in != world.generation:
                found = self._together(found)
            missing = [number for number in numbers if number not in found]
            found |= self._computed(loader, batches, missing, compute)
        finally:
            outside.restore()
        return [found[number] for number in numbers]

    def _next_key(self) -> int:
        """Evaluations after one step are counted, so that a worker that came later counts alike."""
        step = self._run.step
        self._num_made = self._num_made + 1 if step == self._made_at else 0
        self._made_at = step
        return fold(self._run.seed, "evaluation", step, self._num_made)

    def _computed(
        self, loader: "DataLoader[Any]", batches: KeyedBatches, numbers: Sequence[int], compute: Compute
    ) -> dict[int, Any]:
        found: dict[int, Any] = {}
        own: DataLoader[Any] = DataLoader(
            batches,
            batch_size=None,
            sampler=numbers,
            collate_fn=_unchanged,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory and torch.cuda.is_available(),
        )
        for number, batch in zip(numbers, own, strict=True):
            set_generators(fold(batches.key, "compute", number))
            tensors: Tensors = {}
            packed = pack(compute(batch), f"batch {number}", tensors)
            found[number] = unpack(packed, {name: tensor.cpu() for name, tensor in tensors.items()})
        return found

    def _together(self, mine: dict[int, Any]) -> dict[int, Any]:
        tensors: Tensors = {}
        content = to_bytes(pack(mine, "evaluated", tensors), tensors)
        try:
            everyone = self._run.guard.exchange(content, "an evaluation")
        except WorkerLost:
            self._failed_in = self._run.guard.generation.world.generation
            return mine
        return {number: value for theirs in everyone for number, value in unpack(*from_bytes(theirs)).items()}


def _unchanged(batch: Any) -> Any:
    return batch
