"""How a worker failed, as a value that travels from the worker to the launcher as JSON."""

import json
import os
import re
import select
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from lockstep.errors import Disagreement, WorkerLost
from lockstep.launch.channels.exits import LEFT_OUT, MISPLACED, OutOfPlace
from lockstep.launch.channels.traceback_lines import Frame, original, user_frames, user_traceback
from lockstep.launch.host.folder import write_whole

RAISED, QUIT, KILLED, EXITED = "raised", "quit", "killed", "exited"
_SHORT = 300
_ALLOCATION = re.compile(
    "can't allocate memory|not enough memory|unable to allocate|out of memory|bad_alloc", re.IGNORECASE
)
_REQUESTED = re.compile(r"tried to allocate (\d+) bytes")


@dataclass(frozen=True)
class Failure:
    """One worker's failure.

    `how` is RAISED (then `kind` is the exception's class), QUIT (it called `sys.exit`, with `kind`), KILLED (`kind` is
    the signal) or EXITED (it ended without a report, and `kind` is the exit code). `rank` is the worker's slot, its
    name in messages. `secondary`: it only reports another worker's failure. `time_s` is on the host's monotonic clock,
    which all its processes share. `traceback` is the whole traceback, for the log.
    """

    rank: int
    step: int | None
    kind: str
    message: str
    frames: tuple[Frame, ...]
    secondary: bool
    time_s: float
    how: str = RAISED
    worker_id: str = ""
    """No other worker of its pool ever has this id."""
    traceback: str = ""

    @classmethod
    def of(cls, exception: BaseException, rank: int, step: int | None, rank_now: int | None = None) -> "Failure":
        """The failure of the worker `rank`, which `exception` ended just now.

        `rank_now` is its number among the present members, by which they call each other, where it differs.
        """
        if isinstance(exception, OutOfPlace):
            why, now_s, own_id = str(exception), time.monotonic(), id_of_process(os.getpid())
            return cls(rank, step, str(MISPLACED), why, (), False, now_s, EXITED, own_id, why + "\n")
        quits = isinstance(exception, SystemExit)
        kind, message = original(type(exception).__name__, str(exception))
        return cls(
            rank=rank,
            step=step,
            kind=repr(exception.code) if isinstance(exception, SystemExit) else kind,
            message="" if quits else _with_memory_facts(kind, message),
            frames=user_frames(exception),
            secondary=not quits and _reports_another(exception, rank if rank_now is None else rank_now),
            time_s=time.monotonic(),
            how=QUIT if quits else RAISED,
            worker_id=id_of_process(os.getpid()),
            traceback=user_traceback(exception),
        )

    @property
    def sentence(self) -> str:
        """The worker's report in one sentence; "" if it left none."""
        parts = [self.kind, self.message] if self.how == RAISED else [self.message]
        return ": ".join(part for part in parts if part)

    @property
    def is_loss(self) -> bool:
        """Whether the worker was lost through no fault of the user's code."""
        return self.how == KILLED or self._exited_with(LEFT_OUT)

    @property
    def is_misplaced(self) -> bool:
        """Whether the worker left because its script was not where the others' were."""
        return self._exited_with(MISPLACED)

    def _exited_with(self, code: int) -> bool:
        return self.how == EXITED and self.kind == str(code)

    @property
    def is_error(self) -> bool:
        """Whether the user's code ended the worker, and would do so again."""
        return self.how in (RAISED, QUIT)

    def to_json(self, indent: int | None = 1) -> str:
        return json.dumps(asdict(self), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> "Failure":
        fields = json.loads(text)
        return cls(**{**fields, "frames": tuple(Frame(*frame) for frame in fields["frames"])})


def id_of_process(pid: int) -> str:
    """The id of a worker that is a process of this host."""
    return f"pid {pid}"


def report_path(folder: Path, rank: int) -> Path:
    return folder / f"worker-{rank}.failure.json"


def write_report(failure: Failure, folder: Path) -> None:
    """Writes the whole report into `folder`, or raises and leaves nothing."""
    write_whole(report_path(folder, failure.rank), failure.to_json())


# Note [Notices]
# A worker that has failed writes one line into a pipe that all workers share: its id, a tab, and, if the disk has no
# room for its report, the report itself, cut short. A note that holds for this worker alone is such a line too, because
# the launcher shows one worker's output: then the text of the note comes after a second tab. The kernel writes a line
# of at most PIPE_BUF bytes whole.


@dataclass(frozen=True)
class Notice:
    """A worker has failed, and has left this `report` if the folder had no room for it; or it says a `note`."""

    worker_id: str
    report: Failure | None = None
    note: str = ""

    @classmethod
    def parsed(cls, line: str) -> "Notice":
        worker_id, report, *note = line.split("\t", 2)
        return cls(worker_id, Failure.from_json(report) if report else None, "".join(note))


def notice_of(failure: Failure, has_report: bool) -> bytes:
    """The line for the launcher's pipe. See Note [Notices]."""
    return f"{failure.worker_id}\t{'' if has_report else _cut_short(failure)}\n".encode()


def note_of(worker_id: str, text: str) -> bytes:
    """The same, for a note."""
    words = " ".join(text.split()).encode()[: select.PIPE_BUF - 64].decode(errors="ignore")
    return f"{worker_id}\t\t{words}\n".encode()


def note_of_worker(slot: int, note: str) -> str:
    """As the launcher shows it."""
    return f"  note: worker {slot}: {note}"


class NoticePipe:
    """The pipe of the workers' notices. Workers inherit `worker_fd`. One owner, who calls `close`."""

    def __init__(self) -> None:
        self._fd, self.worker_fd = os.pipe()
        self._half = b""

    def fileno(self) -> int:
        """Readable when there is a notice."""
        return self._fd

    def read(self) -> list[Notice]:
        *lines, self._half = (self._half + os.read(self._fd, 1 << 16)).split(b"\n")
        return [Notice.parsed(line.decode()) for line in lines]

    def close(self) -> None:
        os.close(self._fd)
        os.close(self.worker_fd)


def _cut_short(failure: Failure) -> str:
    """The failure in less than PIPE_BUF bytes."""
    short = replace(failure, traceback="", message=failure.message[:_SHORT])
    text = short.to_json(indent=None)
    if len(text) > select.PIPE_BUF - 32:
        text = replace(short, frames=(), kind=short.kind[:_SHORT]).to_json(indent=None)
    return text


def read_report(folder: Path, rank: int) -> Failure | None:
    """The report of worker `rank`, or None if it left none that can be read."""
    try:
        return Failure.from_json(report_path(folder, rank).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def clear_report(folder: Path, rank: int) -> None:
    report_path(folder, rank).unlink(missing_ok=True)


def first_failure(failures: Iterable[Failure]) -> Failure:
    """The earliest failure that is not secondary; if all are, the earliest."""
    return min(failures, key=lambda failure: (failure.secondary, failure.time_s))


def _reports_another(exception: BaseException, rank: int) -> bool:
    return any(
        isinstance(link, WorkerLost) or (isinstance(link, Disagreement) and link.here != rank)
        for link in _chain(exception)
    )


def _chain(exception: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it was raised from, or while handling: a `finally` may hide the first."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:
        seen.add(id(exception))
        yield exception
        exception = exception.__cause__ or (None if exception.__suppress_context__ else exception.__context__)


def _with_memory_facts(kind: str, message: str) -> str:
    """The message of an exception; if memory had run out, led by how much was asked for and how much was free."""
    if kind not in ("MemoryError", "OutOfMemoryError") and not _ALLOCATION.search(message):
        return message
    requested = _REQUESTED.search(message)
    amount = f"{_gib(int(requested[1]))} asked for, " if requested else ""
    facts = f"out of memory: {amount}{_gib(psutil.virtual_memory().available)} free on this host"
    return f"{facts}. {message}" if message else facts


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
