"""Where a run is: which epoch, and where each loader stands in its data.

# Note [Where an epoch is resumed]
# A checkpoint saved in the middle of a loader's pass resumes inside that epoch, at the next batch. One saved after
# the pass that the epoch trained on, at the end of the epoch's body, resumes at the next epoch: the body's end has
# been done. A loader that is only evaluated on does not count. Steps on batches that came from no loader have no
# position to go back to: an epoch with such steps counts as done.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.data import Position, ShardedLoader
from lockstep.errors import BadCheckpoint


@dataclass(frozen=True)
class Place:
    """Where a loader of a checkpoint stood, and in which batches that is counted; None if the checkpoint is older."""

    position: Position
    batches: tuple[str, int | None] | None

    def check(self, index: int, loader: ShardedLoader) -> None:
        """Refuses a loader that is not the checkpoint's, where the place is in the middle of a pass."""
        if self.position.step > 0 and self.batches is not None and self.batches != loader.batches:
            raise BadCheckpoint(
                f"loader {index} of the checkpoint stands {self.position.step} batches into a pass, and counts "
                f"{_in_words(self.batches)}; here it has {_in_words(loader.batches)}, so that place cannot be found. "
                "Go on with the same batches until the pass has ended, or from a checkpoint between two passes."
            )


@dataclass
class Progress:
    """The epoch under way and, after a resume, where loaders that are still to come must start."""

    epoch: int = 0
    waiting: dict[int, Place] = field(default_factory=dict)
    trained_on: set[int | None] = field(default_factory=set)
    passes_before: list[int] = field(default_factory=list)
    in_epoch: bool = False
    on_epoch_end: Callable[[], None] | None = None

    def epochs(self, count: int, loaders: Sequence[ShardedLoader]) -> Iterator[int]:
        while self.epoch < count:
            self._begin(loaders)
            self.in_epoch = True
            yield self.epoch
            self.in_epoch = False
            self.epoch += 1
            self._begin(loaders)
            if self.on_epoch_end is not None:
                self.on_epoch_end()

    def epoch_to_resume(self, loaders: Sequence[ShardedLoader]) -> int:
        """See Note [Where an epoch is resumed]."""
        passes = enumerate(zip(loaders, self.passes_before, strict=False))
        ended = {index for index, (loader, before) in passes if loader.position.epoch > before}
        finished = bool(self.trained_on & (ended | {None}))
        under_way = any(loader.mid_pass for loader in loaders)
        return self.epoch + 1 if finished and not under_way else self.epoch

    def _begin(self, loaders: Sequence[ShardedLoader]) -> None:
        """Nothing of epoch `self.epoch` is done."""
        self.passes_before = [loader.position.epoch for loader in loaders]
        self.trained_on.clear()

    def place_loader(self, index: int, loader: ShardedLoader) -> None:
        if index in self.waiting:
            self.waiting[index].check(index, loader)
            loader.seek(self.waiting.pop(index).position)


def places(state: Mapping[str, Any]) -> list[Place]:
    """Where each loader stood. A checkpoint may be from before batches were written down."""
    positions = [Position(*position) for position in state["loaders"]]
    batches = state.get("batches") or [None] * len(positions)
    return [
        Place(position, None if counted is None else (counted[0], counted[1]))
        for position, counted in zip(positions, batches, strict=True)
    ]


def _in_words(batches: tuple[str, int | None]) -> str:
    how, size = batches
    told = "batches of its own sizes" if size is None else f"batches of {size}"
    return f'{told} (batch="{how}")'
