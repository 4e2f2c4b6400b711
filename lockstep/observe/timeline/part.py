"""A worker's part of the timeline: a file of the events that it has seen, a line for each step.

Note [Parts]
Each process of a worker writes a file of its own, `timeline/worker-SLOT-PID.jsonl` in the run's folder. The first line
is the head, a JSON object: which worker on which host, and how the host's monotonic clock stands to the time of day.
Every other line is a JSON array of records, each an array too: nanoseconds on the monotonic clock, the kind of event,
its step, and the event's fields.

Events are tuples in a queue at first, which is all that the threads at work do for the timeline. Where a worker has
ended its lanes and waits for the others, it makes one line of what is in the queue, in one write, if the last time was
WRITE_EVERY_S ago: to format many events at once takes a fraction of the time that it takes one by one between other
work. So a worker that is killed leaves all but the step in which it was killed and the quarter of a second before;
half a line is left out by who reads. The queue holds MOST_QUEUED events: of more, without a step, the newest. A part
that has become long is put aside as `.old`, in place of the one before: of a run that goes on for ever the newest
steps are kept.
"""

import json
import os
import platform
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.events import (
    BackwardBegan,
    BackwardEnded,
    BatchLoaded,
    BucketFilled,
    CheckpointSaved,
    Closed,
    Copied,
    Event,
    Events,
    EventTuple,
    GenerationFormed,
    JoinBegan,
    LaneBegan,
    LaneEnded,
    RecoveryBegan,
    ReduceBegan,
    ReduceDone,
    StepBegan,
    StepCommitted,
    UpdateBegan,
    UpdateEnded,
    Wait,
    WaitBegan,
    WaitEnded,
)

FOLDER = "timeline"
MOST_BYTES = 32 << 20
"""A part of this size is put aside. See Note [Parts]."""

MOST_QUEUED = 1 << 16
WRITE_EVERY_S = 0.25
"""See Note [Parts]."""

FIELDS: dict[type[Event], int] = {
    StepBegan: 0,
    LaneBegan: 2,
    LaneEnded: 1,
    BackwardBegan: 0,
    BackwardEnded: 0,
    BucketFilled: 1,
    ReduceBegan: 1,
    ReduceDone: 1,
    WaitBegan: 3,
    WaitEnded: 1,
    StepCommitted: 2,
    UpdateBegan: 0,
    UpdateEnded: 0,
    BatchLoaded: 2,
    CheckpointSaved: 2,
    RecoveryBegan: 0,
    JoinBegan: 0,
    GenerationFormed: 8,
    Copied: 1,
    Closed: 0,
}
"""What a part holds: the kinds of events, and how many of their fields, from the first; one that was not given is 0."""

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME = re.compile(r"worker-\d+-\d+\.jsonl(\.old)?")


@dataclass(frozen=True)
class Head:
    """Who wrote a part. `boot` is the same for all processes that share a monotonic clock."""

    worker: int
    pid: int
    host: str
    boot: str
    monotonic_ns: int
    wall_ns: int
    device: str
    generation: int
    """That of the worker when the part began; 0 for one that is not a member yet."""


class Record(NamedTuple):
    """One event of a part."""

    time_ns: int
    kind: str
    step: int
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Part:
    head: Head
    records: tuple[Record, ...]


class PartWriter:
    """Records a worker's events and writes them to its part, from `begin` until `steps` steps are over.

    `generation` gives the present one. Where the part cannot be written, `say` is called once, nothing is written any
    more, and training goes on.
    """

    def __init__(
        self,
        events: Events,
        folder: Path,
        device: str,
        generation: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        self._events, self._folder, self._device = events, folder.absolute() / FOLDER, device
        self._generation, self._say = generation, say
        self._queue: deque[EventTuple] = deque(maxlen=MOST_QUEUED)
        self._fd: int | None = None
        self._last_step: int | None = None
        self._num_bytes = 0
        self._write_s = 0.0
        """When the queue is to be written again."""

    def begin(self, steps: int | None = None) -> None:
        """From now on events are written: of so many steps, or of all that come."""
        self._last_step = None if steps is None else self._events.step + steps - 1
        if self._fd is None and self._open():
            self._events.subscribe(self, StepBegan, WaitBegan, GenerationFormed, Copied, Closed)
            self._events.record(FIELDS.keys() - {GenerationFormed}, self._queue.append)

    def __call__(self, event: Event) -> None:
        """On the script's thread. The event itself was recorded, if its kind is."""
        match event:
            case WaitBegan(wait, num_buckets=num_buckets):
                if wait is Wait.STEP and not num_buckets and event.time_s >= self._write_s:
                    self._write_queue()
                    self._write_s = event.time_s + WRITE_EVERY_S
            case StepBegan():
                if self._last_step is not None and event.step > self._last_step:
                    self._queue.pop()
                    self.close()
            case GenerationFormed():
                self._queue.append((event.time_s, GenerationFormed.__name__, event.step, _formed(event)))
            case Copied():
                self._move()
            case Closed():
                self.close()

    def _move(self) -> None:
        """The file, and what was recorded, belong to the worker that this one was copied from."""
        copied = self._queue.pop()
        self._queue.clear()
        self._queue.append(copied)
        self._close_file()
        self._open()

    def _write_queue(self) -> None:
        """The thread that reduces may add to the queue meanwhile."""
        queued = [self._queue.popleft() for _ in range(len(self._queue))]
        if queued and self._fd is not None:
            records = [(int(time_s * 1e9), kind, step, fields) for time_s, kind, step, fields in queued]
            self._write(_encode(records) + "\n")
            if self._num_bytes > MOST_BYTES:
                self._put_aside()

    def close(self) -> None:
        self._write_queue()
        self._stop()

    def _stop(self) -> None:
        if self._fd is not None:
            self._events.unsubscribe(self)
            self._events.stop_recording()
            self._close_file()

    def _open(self) -> bool:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._fd, self._num_bytes = os.open(self._path, _FLAGS, 0o644), 0
        except OSError as error:
            self._give_up(error)
            return False
        self._write(json.dumps(vars(self._head())) + "\n")
        return self._fd is not None

    @property
    def _path(self) -> Path:
        return self._folder / f"worker-{self._events.worker}-{os.getpid()}.jsonl"

    def _head(self) -> Head:
        monotonic_ns, wall_ns = time.monotonic_ns(), time.time_ns()
        name = platform.node()
        generation = self._generation()
        return Head(
            self._events.worker, os.getpid(), name, _boot(name), monotonic_ns, wall_ns, self._device, generation
        )

    def _write(self, text: str) -> None:
        line = text.encode()
        assert self._fd is not None
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self._give_up(error)
            return
        self._num_bytes += written

    def _put_aside(self) -> None:
        self._close_file()
        try:
            self._path.replace(self._path.with_name(f"{self._path.name}.old"))
        except OSError as error:
            self._give_up(error)
        else:
            self._open()

    def _give_up(self, error: OSError) -> None:
        self._stop()
        self._say(
            f"the timeline cannot be written to {self._path}: {error.strerror}. It ends here; training goes on. Make "
            "room and start the run again to see more of it"
        )

    def _close_file(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _formed(event: GenerationFormed) -> tuple[Any, ...]:
    fields = list(GenerationFormed.__match_args__)[: FIELDS[GenerationFormed]]
    return tuple(getattr(event, field) for field in fields)


def _boot(name: str) -> str:
    """What only the processes of one running kernel share: their monotonic clock is one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return name


# -- reading ----------------------------------------------------------------------------------------------------------


def read_parts(folder: Path) -> tuple[Part, ...]:
    """The parts in the run's folder, by worker and then by time; what cannot be read of them is left out."""
    names = sorted(path for path in (folder / FOLDER).glob("worker-*.jsonl*") if _NAME.fullmatch(path.name))
    parts = [part for path in names if (part := parse_part(_lines(path))) is not None]
    return tuple(sorted(parts, key=lambda part: (part.head.worker, part.head.monotonic_ns)))


def parse_part(lines: Iterable[str]) -> Part | None:
    """The part in these lines; None if they do not begin with a head."""
    texts = iter(lines)
    head = _parsed(next(texts, ""))
    if not isinstance(head, Mapping) or set(head) != set(Head.__dataclass_fields__):
        return None
    found = (_record(values) for text in texts for values in _list(_parsed(text)))
    return Part(Head(**head), tuple(sorted((one for one in found if one is not None), key=lambda one: one.time_ns)))


def _lines(path: Path) -> list[str]:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), encoding="utf-8") as file:
            return file.read().splitlines()
    except (OSError, ValueError):
        return []


def _parsed(text: str) -> Any:
    """A number that is not finite is none."""
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except ValueError:
        return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _record(values: Any) -> Record | None:
    match values:
        case [int() as time_ns, str() as kind, int() as step, list() as given] if kind in _NUM_FIELDS:
            num_fields = _NUM_FIELDS[kind]
            fields = (*given, *[0] * num_fields)[:num_fields]
            return Record(time_ns, kind, step, fields)
    return None


_NUM_FIELDS = {kind.__name__: num_fields for kind, num_fields in FIELDS.items()}
