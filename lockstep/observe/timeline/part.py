"""A worker's part of the timeline: a file of the events that it has seen, one line each.

Note [Parts]
Each process of a worker writes a file of its own, `timeline/worker-SLOT-PID.jsonl` in the run's folder. The first line
is the head, a JSON object: which worker on which host, and how the host's monotonic clock stands to the time of day.
Every other line is a JSON array: nanoseconds on the monotonic clock, the kind of event, its step, and the event's
fields. A line is one write, so that a worker that is killed leaves all lines but the one that it was writing; half a
line is left out by who reads. A part that has become long is put aside as `.old`, in place of the one before: of a run
that goes on for ever the newest steps are kept.
"""

import json
import os
import platform
import re
import time
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
    WaitBegan,
    WaitEnded,
)

FOLDER = "timeline"
MOST_BYTES = 32 << 20
"""A part of this size is put aside. See Note [Parts]."""

FIELDS: dict[type[Event], tuple[str, ...]] = {
    StepBegan: (),
    LaneBegan: ("lane", "trains"),
    LaneEnded: ("lane",),
    BackwardBegan: (),
    BackwardEnded: (),
    BucketFilled: ("bucket",),
    ReduceBegan: ("bucket",),
    ReduceDone: ("bucket",),
    WaitBegan: ("wait", "bucket", "num_buckets"),
    WaitEnded: ("wait",),
    StepCommitted: ("num_samples", "loss"),
    UpdateBegan: (),
    UpdateEnded: (),
    BatchLoaded: ("loader", "waited_s"),
    CheckpointSaved: ("path", "took_s"),
    RecoveryBegan: (),
    JoinBegan: (),
    GenerationFormed: ("generation", "slots", "lost", "left", "joined", "moved_lanes", "moved_to", "committed"),
    Copied: ("slot",),
    Closed: (),
}
"""What a part holds: the kinds of events, and which of their fields."""

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
    """A reader of a worker's events that writes them to its part, from `begin` until `steps` steps are over.

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
        self._fd: int | None = None
        self._last_step: int | None = None
        self._num_bytes = 0

    def begin(self, steps: int | None = None) -> None:
        """From now on events are written: of so many steps, or of all that come."""
        self._last_step = None if steps is None else self._events.step + steps - 1
        if self._fd is None and self._open():
            self._events.subscribe(self, *FIELDS)

    def __call__(self, event: Event) -> None:
        """Called by the script's thread and by the one that reduces: a line is one write to a file in append mode."""
        kind = type(event)
        if kind is Copied:  # the file so far belongs to the worker that this one was copied from
            self._close_file()
            if not self._open():
                return
        is_over = self._last_step is not None and event.step > self._last_step
        if is_over and kind is StepBegan:
            self.close()
        elif self._fd is not None:
            self._write(line_of(event))
            if kind is Closed:
                self.close()
            elif self._num_bytes > MOST_BYTES and kind is StepCommitted:
                self._put_aside()

    def close(self) -> None:
        self._events.unsubscribe(self)
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
        self.close()
        self._say(
            f"the timeline cannot be written to {self._path}: {error.strerror}. It ends here; training goes on. Make "
            "room and start the run again to see more of it"
        )

    def _close_file(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def line_of(event: Event) -> str:
    """The event as a line of a part. See Note [Parts]."""
    kind = type(event)
    values = "".join(f",{_as_json(getattr(event, field))}" for field in FIELDS[kind])
    return f'[{int(event.time_s * 1e9)},"{kind.__name__}",{event.step}{values}]\n'


def _as_json(value: Any) -> str:
    if type(value) is int:
        return str(value)
    if type(value) is float and value - value != 0:  # JSON has neither infinity nor NaN
        return "null"
    return json.dumps(value)


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
    found = (_record(_parsed(text)) for text in texts)
    return Part(Head(**head), tuple(sorted((one for one in found if one is not None), key=lambda one: one.time_ns)))


def _lines(path: Path) -> list[str]:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), encoding="utf-8") as file:
            return file.read().splitlines()
    except (OSError, ValueError):
        return []


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _record(values: Any) -> Record | None:
    if not isinstance(values, list) or len(values) < 3 or values[1] not in _KINDS:
        return None
    time_ns, kind, step, *rest = values
    if type(time_ns) is not int or type(step) is not int or len(rest) != _KINDS[kind]:
        return None
    return Record(time_ns, kind, step, tuple(rest))


_KINDS = {kind.__name__: len(fields) for kind, fields in FIELDS.items()}
