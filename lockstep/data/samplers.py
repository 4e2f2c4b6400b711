"""A loader's samplers, and what is known about them without running them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lockstep.errors import BadArgument

TORCHS_OWN = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True)
class Samplers:
    """What draws the indices of each global batch.

    `batched`: one draw is a list of indices, not a single one. `parts` are all the samplers
    involved, `generators` those of the user that they draw from.
    """

    source: Iterable[Any]
    batched: bool
    parts: tuple[Any, ...] = ()
    generators: tuple[torch.Generator, ...] = ()

    @classmethod
    def of(cls, loader: "DataLoader[Any]", batches: Iterable[Any] | None) -> "Samplers":
        """Those of `loader`. `batches` yields the indices of each global batch; None: each item is a whole one."""
        parts = tuple(_distinct(_parts(loader)))
        generators = _distinct(getattr(holder, "generator", None) for holder in (loader, *parts))
        _refuse_distributed(parts)
        return cls(
            loader.sampler if batches is None else batches,
            batches is not None,
            parts,
            tuple(generator for generator in generators if isinstance(generator, torch.Generator)),
        )

    @classmethod
    def endless(cls) -> "Samplers":
        """For a stream, whose samples have no indices: one list after the other, with an index that means nothing."""
        return cls(repeat((0,)), batched=True)

    def begin(self, epoch: int) -> Iterator[Any]:
        """A new pass, after `set_epoch` of the samplers that have it."""
        for part in self.parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
        return iter(self.source)

    @property
    def draw_at_first_only(self) -> bool:
        """Whether chance is used up with the first batch: true of torch's own, unless given a generator."""
        return not self.generators and (not self.parts or type(self._innermost) in TORCHS_OWN)

    @property
    def may_repeat(self) -> bool:
        """Whether an index may come twice in a pass, as far as can be known."""
        sampler = self._innermost
        if type(sampler) is RandomSampler:
            return sampler.replacement or sampler.num_samples > len(sampler.data_source)
        return bool(self.parts) and type(sampler) is not SequentialSampler

    @property
    def own(self) -> tuple[Any, ...]:
        """Those that are not torch's own, and may keep a generator or a place of their own from pass to pass."""
        return tuple(part for part in self.parts if type(part) not in (BatchSampler, *TORCHS_OWN))

    @property
    def has_length(self) -> bool:
        """Whether the samplers have a `len`."""
        try:
            return len(self.source) >= 0  # type: ignore[arg-type]
        except (TypeError, NotImplementedError, AttributeError):
            return False

    @property
    def _innermost(self) -> Any:
        return self.source.sampler if type(self.source) is BatchSampler else self.source


def _parts(loader: "DataLoader[Any]") -> Iterator[Any]:
    yield loader.batch_sampler
    yield getattr(loader.batch_sampler, "sampler", None)
    yield loader.sampler


def _distinct(things: Iterable[Any]) -> Iterator[Any]:
    """Each thing once, by identity and in order, without None."""
    return iter({id(thing): thing for thing in things if thing is not None}.values())


def _refuse_distributed(parts: Iterable[Any]) -> None:
    for part in parts:
        if isinstance(part, DistributedSampler):
            raise BadArgument(
                f"run.shard was given a loader with a {type(part).__name__}, which keeps a part of the data "
                "for each worker. lockstep shards by itself: drop the sampler and use shuffle=True."
            )
