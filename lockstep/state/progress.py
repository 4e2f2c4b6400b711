"""Where a run is in its data: the epoch, and the position of each loader.

# Note [Where an epoch is resumed]
# A checkpoint saved in the middle of a loader's pass resumes inside that epoch, at the next batch. One saved after
# the pass that the epoch trained on, at the end of the epoch's body, resumes at the next epoch: the body's end has
# been done. A loader that is only evaluated on does not count. Steps on batches that came from no loader have no
# position to go back to: an epoch with such steps counts as done. An epoch may have several passes, over one loader or
# over several: those that were over are spent, and yield nothing when the body runs again.

# Note [Numbers of loaders]
# Order and augmentation of a loader depend on its number, so a resumed run must give its loaders the numbers that they
# had. Those that a script makes before it trains are counted from 0. One that is made in the body of an epoch has a
# number for itself in every epoch: a snapshot has how many were made before the epoch in which it is resumed. A loader
# that is made in another loop than that of run.epochs cannot be identified again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.data import GlobalBatch, Position, ShardedLoader
from lockstep.errors import BadCheckpoint, Misuse


@dataclass(frozen=True)
class LoaderPlace:
    """The position of a loader in a checkpoint, and in which batches it is counted; None if the checkpoint is older."""

    position: Position
    batches: tuple[str, int | None] | None
    is_trained_on: bool = False
    num_spent: int = 0
    drawn: str = ""

    def check(self, number: int, loader: ShardedLoader) -> None:
        """Refuses a loader that is not the checkpoint's, where the place is in the middle of a pass."""
        if self.position.step > 0 and self.batches is not None and self.batches != loader.batches:
            raise BadCheckpoint(
                f"loader {number} of the checkpoint stands {self.position.step} batches into a pass, and counts "
                f"{_in_words(self.batches)}; here it has {_in_words(loader.batches)}, so that place cannot be found. "
                "Go on with the same batches until the pass has ended, or from a checkpoint between two passes."
            )


@dataclass
class LoaderCounts:
    """How many loaders a run has made. See Note [Numbers of loaders]."""

    total: int = 0
    before_training: int | None = None
    before_epoch: int = 0
    lost: bool = False
    """Whether one was trained on that could not be identified again."""


@dataclass
class DataProgress:
    """The epoch under way, the loaders by their numbers and, after a resume, where those still to come must start."""

    epoch: int = 0
    loaders: dict[int, ShardedLoader] = field(default_factory=dict)
    waiting: dict[int, LoaderPlace] = field(default_factory=dict)
    trained_on: set[int | None] = field(default_factory=set)
    passes_before: dict[int, int] = field(default_factory=dict)
    begun_before: dict[int, int] = field(default_factory=dict)
    made: LoaderCounts = field(default_factory=LoaderCounts)
    in_epoch: bool = False
    has_committed: bool = False
    """Whether the run has made a step."""
    on_epoch_end: Callable[[], None] | None = None
    on_begin: Callable[[], None] | None = None
    """Called once, when the script begins its first epoch, before anything of its body, or trains without epochs."""
    epochs_under_way: Callable[[], object | None] = lambda: None
    """The iterator by which the script counts epochs, if there is one."""
    _resumed: LoaderCounts | None = None

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, from where the run is."""
        self.begins_training()
        while self.epoch < count:
            self._begin()
            self.in_epoch = True
            yield self.epoch
            self.in_epoch = False
            self.epoch += 1
            self._begin()
            if self.on_epoch_end is not None:
                self.on_epoch_end()

    def start_at(self, epoch: int, step: int) -> None:
        """A run that has trained nothing yet begins at a later epoch: its loaders as if each had had a pass in each
        epoch before. One that has made steps, or was resumed, cannot."""
        if step > 0 or self.epoch > 0:
            raise Misuse(
                f"run.epochs(start={epoch}) is for a run that begins: this one is in epoch {self.epoch}, at step "
                f"{step}, and goes on from there. Leave start out, or do not resume."
            )
        self.epoch = epoch
        for loader in self.loaders.values():
            if loader.position == Position() and not loader.mid_pass:
                loader.seek(Position(epoch, 0))

    def add(self, make: Callable[[int], ShardedLoader]) -> ShardedLoader:
        """A further loader, made with its number, at the position that a resumed run has for it."""
        number = self.made.total
        loader = make(number)
        self._place(number, loader)
        self.made.total += 1
        self.loaders[number] = loader
        return loader

    def waited_ns(self) -> int:
        """How long this worker has waited for all loaders so far."""
        return sum(loader.waited_ns for loader in self.loaders.values())

    def present(self) -> list[ShardedLoader]:
        """All loaders except those made inside of an epoch that is over: a newcomer has never made them."""
        first = self.made.before_training
        is_over = range(0) if first is None else range(first, self.made.before_epoch)
        return [loader for number, loader in self.loaders.items() if number not in is_over]

    def loader_pids(self) -> list[int]:
        return [pid for loader in self.loaders.values() for pid in loader.pids]

    def is_copied(self) -> None:
        """This process is a copy of the one that has made the loaders."""
        for loader in self.loaders.values():
            loader.after_fork()

    def begins_training(self) -> None:
        """The script begins its first epoch, or trains: it has made all loaders that it makes before."""
        if self.made.before_training is not None:
            return
        self.made.before_training = self.made.total
        if self.on_begin is not None:
            self.on_begin()
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.before_training is not None:
            self._go_on_counting(resumed)

    def trains_on(self, number: int | None) -> None:
        """A step trains on a batch of this loader, or on one of the script's own."""
        self.begins_training()
        self.trained_on.add(number)
        assert self.made.before_training is not None
        if number is not None and number >= self.made.before_training and not self.in_epoch:
            self.made.lost = True

    def evaluates(self, batch: GlobalBatch) -> None:
        """A batch is evaluated: a run that resumes from here need not do it again."""
        loader = None if batch.loader is None else self.loaders.get(batch.loader)
        if loader is not None and batch.position is not None:
            loader.evaluated = Position(batch.position.epoch, batch.position.step + 1)

    def resumes_at(self, loader: ShardedLoader) -> Position:
        """Where a run that is resumed from now starts in it. Before the first step nothing was trained: batches that
        were handed out, and not evaluated, are handed out again."""
        is_untouched = not self.has_committed and loader.mid_pass and loader.evaluated is None
        return Position(loader.position.epoch, 0) if is_untouched else loader.resumes_at

    def state(self) -> dict[str, Any]:
        """Its part of a snapshot: where the run resumes, after what was trained."""
        made, is_done = self.made, self._epoch_is_done
        is_inside = self.in_epoch and not is_done
        total = made.before_epoch if is_inside else made.total
        loaders = {str(number): loader for number, loader in self.loaders.items()}
        positions = {n: self.resumes_at(loader) for n, loader in loaders.items()}
        return {
            "epoch": self.epoch + is_done,
            "loaders": {n: [position.epoch, position.step] for n, position in positions.items()},
            "batches": {n: list(loader.batches) for n, loader in loaders.items()},
            "drawn": {n: loader.drawn_at(positions[n]) for n, loader in loaders.items()},
            "trained_on": [number for number, loader in self.loaders.items() if loader.is_trained_on],
            "spent": self.spent() if is_inside else {},
            "made": {"before_training": made.before_training, "total": total, "lost": made.lost},
        }

    def spent(self) -> dict[str, int]:
        """How many passes of the epoch under way are over, by the loaders that it trained on."""
        begun = {n: one.num_begun - self.begun_before.get(n, 0) for n, one in self.loaders.items()}
        over = {n: begun[n] - self.loaders[n].mid_pass for n in self.trained_on if n is not None}
        return {str(number): count for number, count in over.items() if count > 0}

    def load(self, state: Mapping[str, Any], rekey: Callable[[ShardedLoader], None]) -> None:
        """Restores its part of a snapshot; `rekey` sets a loader's seed and lanes to those of the run."""
        made = state.get("made", {})
        if made.get("lost"):
            raise BadCheckpoint(
                "the checkpoint's run trained on a loader that was made by run.shard inside its training loop, so its "
                "place cannot be found again. Make loaders before the loop, or loop by run.epochs."
            )
        self.epoch, self.has_committed = state["epoch"], state["step"] > 0
        self.waiting = places(state)
        self._resumed = LoaderCounts(made["total"], made["before_training"]) if made else None
        for number, loader in self.loaders.items():
            rekey(loader)
            self._place(number, loader)

    @property
    def _epoch_is_done(self) -> bool:
        """See Note [Where an epoch is resumed]."""
        ended = {n for n, loader in self.loaders.items() if loader.position.epoch > self.passes_before.get(n, 0)}
        under_way = any(self.loaders[number].mid_pass for number in self.trained_on if number is not None)
        return bool(self.trained_on & (ended | {None})) and not under_way

    def _begin(self) -> None:
        self.passes_before = {number: loader.position.epoch for number, loader in self.loaders.items()}
        self.begun_before = {number: loader.num_begun for number, loader in self.loaders.items()}
        self.trained_on.clear()
        self.made.before_epoch = self.made.total

    def _place(self, number: int, loader: ShardedLoader) -> None:
        if number in self.waiting:
            self.waiting[number].check(number, loader)
            place = self.waiting.pop(number)
            loader.seek(place.position, is_trained_on=place.is_trained_on, num_spent=place.num_spent)
            if place.drawn and not place.num_spent:
                loader.check_drawn(place.drawn)

    def _go_on_counting(self, resumed: LoaderCounts) -> None:
        if resumed.before_training != self.made.total:
            raise BadCheckpoint(
                f"the checkpoint's run had made {resumed.before_training} loaders by run.shard when it began to train, "
                f"and this one has made {self.made.total}: which is which cannot be known. Make the same ones, in the "
                "same order, before the first epoch."
            )
        self.made.total = resumed.total


def places(state: Mapping[str, Any]) -> dict[int, LoaderPlace]:
    """The position of each loader. An older checkpoint may have no batches, or no numbers."""
    positions, batches = _numbered(state["loaders"]), _numbered(state.get("batches") or {})
    trained_on, spent = state.get("trained_on", ()), _numbered(state.get("spent", {}))
    drawn = _numbered(state.get("drawn", {}))
    return {
        number: LoaderPlace(
            Position(*position),
            None if batches.get(number) is None else tuple(batches[number]),
            is_trained_on=number in trained_on,
            num_spent=spent.get(number, 0),
            drawn=drawn.get(number, ""),
        )
        for number, position in positions.items()
    }


def _numbered(saved: Any) -> dict[int, Any]:
    return (
        dict(enumerate(saved)) if isinstance(saved, list) else {int(number): value for number, value in saved.items()}
    )


def _in_words(batches: tuple[str, int | None]) -> str:
    how, size = batches
    sizes = "batches of its own sizes" if size is None else f"batches of {size}"
    return f'{sizes} (batch="{how}")'
