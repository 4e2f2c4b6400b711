"""What happens in a run, as values. Every room emits events; readers subscribe: console, log, status page, traces.

Those of the launcher are in launch/events.py.

An event carries references, not copies: a reader that keeps a tensor clones it. Readers change nothing in it; the
classes are not frozen, because several events are made in every step, and a frozen one takes three times as long.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar

Fields = ParamSpec("Fields")


@dataclass(kw_only=True)
class Event:
    """What every event carries: when (on the host's monotonic clock), on which worker (its slot), in which step.

    `Events.emit` fills them in. The step is the one under way, or the next one.
    """

    time_s: float = 0.0
    worker: int = 0
    step: int = 0


@dataclass
class Started(Event):
    """The run is set up on this worker."""

    script: str
    num_workers: int
    num_lanes: int
    seed: int
    threads: int
    exact: bool
    device: str = ""
    wire: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class Note(Event):
    """Something the user should know once. The first worker shows it for all, unless it holds for `one_worker` only.

    With `in_log`, only that worker's log has it: where a launcher shows one worker's output, it shows other notes too.
    """

    text: str
    one_worker: bool = False
    in_log: bool = False


KEPT_BY_LANE = "a lane keeps something for the next one"
"""How a Note begins that may explain why two runs differ: `lockstep verify` repeats it."""

KEPT_BY_DATA = "a data set keeps something for the next sample"
"""The same of what is read."""


@dataclass
class GraphCompiled(Event):
    """torch.compile has been given a graph: what of it bears on the bits, in words."""

    text: str


@dataclass
class StepBegan(Event):
    """A training step is about to start: all updates of earlier steps are applied.

    `batch` is the number of its batch in the loader's pass; None if the batch is the script's own.
    """

    batch: int | None = None


@dataclass
class LaneBegan(Event):
    """A lane was handed to the user's code, in training or in an evaluation; its generators are set."""

    lane: int
    trains: bool
    data: Any = None


@dataclass
class LaneGradients(Event):
    """Some of a training lane's own gradients, by name, before weighting: a bucket is about to take them."""

    lane: int
    gradients: Mapping[str, Any]


@dataclass
class LaneEnded(Event):
    """A lane, of training or evaluation, is over; the generators stand as the user's code left them."""

    lane: int


@dataclass
class BackwardBegan(Event):
    """The script begins a backward pass, inside of its lanes."""


@dataclass
class BackwardEnded(Event):
    """The backward pass is over, also where it has raised; on a GPU, that work was queued."""


@dataclass
class BucketFilled(Event):
    """This worker's lanes are folded into a bucket, and it was handed to the wire, maybe before the backward ended."""

    bucket: int


@dataclass
class ReduceBegan(Event):
    """The wire begins to add a bucket over all workers. Emitted on the thread that reduces."""

    bucket: int


@dataclass
class ReduceDone(Event):
    """A bucket is added up; on a GPU, that work was queued. Emitted on the thread that reduces."""

    bucket: int


class Wait(StrEnum):
    """Where a worker waits for others."""

    STEP = "the end of a step"
    START = "lockstep.start"
    REPLICATE = "run.replicate"
    RESUME = "run.resume"
    CHECKPOINTS = "run.checkpoints"
    TOTAL = "run.total"
    GATHER = "run.gather"
    EXCHANGE = "an exchange between steps"
    STATISTICS = "synchronised batch norm"
    UPDATE = "optimizer.step()"
    END = "the end of the run"


@dataclass
class WaitBegan(Event):
    """This worker has nothing to do until others are there.

    At the end of a step it waits for the sum of `bucket`, one of `num_buckets`, or, before that, for all records.
    """

    wait: Wait
    bucket: int = 0
    num_buckets: int = 0


@dataclass
class WaitEnded(Event):
    """What was waited for is there. After a wait that fails there is none."""

    wait: Wait


@dataclass
class StepCommitted(Event):
    """The gradient of a step stands in `p.grad`, on every worker."""

    num_samples: int
    loss: float | None


@dataclass
class StepWithdrawn(Event):
    """All workers have computed the step without its newcomers, and undone it: it is computed again, with them."""


@dataclass
class UpdateBegan(Event):
    """An optimizer of the run begins its update; `step` is the one whose gradient it takes."""


@dataclass
class UpdateEnded(Event):
    """The optimizer's update is made; on a GPU, that work was queued."""


@dataclass
class BatchLoaded(Event):
    """A loader of the run handed out a batch, for which this worker waited so long."""

    loader: int
    waited_s: float


@dataclass
class CheckpointSaved(Event):
    """A checkpoint is on disk, whole. `took_s` counts from its snapshot; most of it passes in the background."""

    path: str
    took_s: float


@dataclass
class NoiseMeasured(Event):
    """The gradient noise scale was measured in a step; `plain` and `preconditioned` are `lockstep.optim.Noise`.

    `optimizer` is "sgd" or "adam", by how it uses gradients, or "" if it is neither. `preconditioned` is the noise as
    Adam sees it, None for other optimizers. Emitted on every worker, with the same numbers.
    """

    num_lanes: int
    optimizer: str
    plain: Any
    preconditioned: Any


@dataclass
class GenerationFormed(Event):
    """Workers were lost, have left or have joined; `slots` are those who go on, by rank.

    The lanes of those who were lost moved to `moved_to`. `committed`: the step under way had its gradient everywhere
    and counts; else it is computed again. `in_update`: they were lost in `optimizer.step()`, after the step before, and
    the others have made their part of that update.
    """

    generation: int
    slots: tuple[int, ...]
    lost: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]
    moved_lanes: tuple[int, ...]
    moved_to: tuple[int, ...]
    committed: bool
    cause: str
    took_s: float
    in_update: bool = False


@dataclass
class RecoveryBegan(Event):
    """A worker was lost, or workers are to come or go: this one takes part in forming the next generation."""


@dataclass
class JoinBegan(Event):
    """This worker, a newcomer, asks the members to admit it."""


@dataclass
class Copied(Event):
    """This process is a copy of the worker that it was until now, and takes the place `slot`."""

    slot: int


@dataclass
class Closed(Event):
    """The run has ended on this worker."""


Subscriber = Callable[[Event], None]
EventTuple = tuple[float, str, int, tuple[Any, ...]]
"""When, the name of the kind, the step, and the fields that were given by position."""
AnyEvent = TypeVar("AnyEvent", bound=Event)


class Events:
    """Hands every event to those who subscribed to its kind, in the order they subscribed.

    `worker` and `step` are put into every event; their owners keep them up to date. An event that nobody reads is not
    made: that costs a look into a table.
    """

    def __init__(self, worker: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.worker, self.step = worker, 0
        self._clock = clock
        self._subscribers: list[tuple[Subscriber, tuple[type[Event], ...]]] = []
        self._recorded: frozenset[object] = frozenset()
        self._record: Callable[[EventTuple], None] = _forget
        self._by_kind: dict[object, tuple[str, tuple[Subscriber, ...]]] = {}

    def subscribe(self, subscriber: Subscriber, *kinds: type[Event]) -> None:
        """To events of these kinds; to all if none are named."""
        self._subscribers.append((subscriber, kinds))
        self._by_kind.clear()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """The subscriber receives nothing more, of any kind; a thread that is emitting now may still call it."""
        self._subscribers = [(one, kinds) for one, kinds in self._subscribers if one is not subscriber]
        self._by_kind.clear()

    def record(self, kinds: Iterable[type[Event]], append: Callable[[EventTuple], None]) -> None:
        """From now on `append` is called for events of these kinds, before their readers, in place of the one before.

        It is given no event, which takes longer to make than a record of it. Threads call it at once.
        """
        self._recorded, self._record = frozenset(kinds), append
        self._by_kind.clear()

    def stop_recording(self) -> None:
        self.record((), _forget)

    def has_readers(self, kind: type[Event]) -> bool:
        """Whether somebody reads events of this kind: for one that is dear to make."""
        return any(self._readers(kind))

    def emit(self, kind: Callable[Fields, AnyEvent], *args: Fields.args, **fields: Fields.kwargs) -> None:
        """Makes an event of `kind` from the fields given, and hands it to its readers, on this thread."""
        recorded, readers = self._by_kind.get(kind) or self._readers(kind)
        if recorded:
            self._record((self._clock(), recorded, fields.get("step", self.step), args))  # type: ignore[arg-type]
        if readers:
            event = kind(*args, **fields)
            event.time_s, event.worker = self._clock(), self.worker
            if "step" not in fields:
                event.step = self.step
            for reader in readers:
                reader(event)

    def publish(self, event: Event) -> None:
        """Hands a whole event, made with its worker and step, to its readers; its time is now, unless it has one."""
        event.time_s = event.time_s or self._clock()
        for reader in self._readers(type(event))[1]:
            reader(event)

    def note(self, text: str, *, one_worker: bool = False, in_log: bool = False) -> None:
        """Emits a Note."""
        self.emit(Note, text, one_worker=one_worker, in_log=in_log)

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Inside, this worker waits for others."""
        self.emit(WaitBegan, wait)
        yield
        self.emit(WaitEnded, wait)

    def _readers(self, kind: Any) -> tuple[str, tuple[Subscriber, ...]]:
        """The name under which a kind is recorded, "" if it is not; and who reads it."""
        found = self._by_kind.get(kind)
        if found is None:
            readers = tuple(one for one, kinds in self._subscribers if not kinds or kind in kinds)
            found = self._by_kind[kind] = kind.__name__ if kind in self._recorded else "", readers
        return found


def _forget(_: EventTuple) -> None:
    pass
