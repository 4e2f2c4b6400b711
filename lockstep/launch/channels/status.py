"""The status page: what every worker is doing now, in memory that the launcher shares with its workers.

The launcher makes the page (`StatusPage`), each worker writes its own row (`StatusWriter`), and any process may read. A
row is a few 64-bit numbers. There is no lock: a store of one number is atomic, and a reader reads a row until it has
seen the same values twice.

# Note [Where the time goes]
# A worker adds up the time that it has spent in lanes (compute), from the end of its last lane to the commit and in
# other waits for all workers (waiting), and waiting for its loaders (data), each up to its last commit. The rest of the
# time between two commits is the user's code between steps, the optimizer included, and all that has no phase of its
# own. Only differences between two reads mean anything.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, IntFlag

MAX_SLOTS = 1024
_FIELDS = 21
_ROW = struct.Struct(f"<{_FIELDS}q")
_PAGE_BYTES = MAX_SLOTS * _ROW.size
_MOST_LOOKS = 8

# The index of each field in its row.
PID, ENDPOINT_PORT, GENERATION, RANK, SIZE, STEP, PHASE, SINCE_NS = range(8)
DETAIL_A, DETAIL_B, USUAL_STEP_NS, COMMITTED_NS, NUM_LANES = range(8, 13)
DATA_NS, COMPUTE_NS, WAITING_NS = range(13, 16)
PATIENT_UNTIL_NS, SAVED, TRAITS, MEMORY_BYTES, GPU_BYTES = range(16, 21)


NOBODY = -1
"""In place of a process id: the slot stays empty."""


class Phase(IntEnum):
    """What a worker does."""

    STARTING = 0
    """In `lockstep.start`, or before it."""
    OUTSIDE = 1
    """The user's code between steps."""
    COMPUTING = 2
    """In a lane."""
    REDUCING = 3
    """Waits for other workers, in a step."""
    RECOVERING = 4
    JOINING = 5
    """Asks the members to admit it."""
    ENDED = 6
    AWAITING = 7
    """Waits for other workers in a call (`Collective`)."""


class Trait(IntFlag):
    """What decides whether the launcher asks a worker for a copy."""

    MAY_BE_COPIED = 1
    READS_RANK = 2
    """Its script has read `run.rank` before it trained: worker 0 may hold objects that no other has."""


class Collective(IntEnum):
    """Where a worker waits for all others, apart from reductions."""

    START = 1
    REPLICATE = 2
    RESUME = 3
    CHECKPOINTS = 4
    TOTAL = 5
    GATHER = 10
    STATISTICS = 6
    """Synchronised batch norm, in the middle of a lane."""
    END = 7
    UPDATE = 8
    EXCHANGE = 9


@dataclass(frozen=True)
class StatusRow:
    """One worker's row. Times are on the host's monotonic clock, which all its processes share."""

    pid: int = 0
    endpoint_port: int = 0
    """0: none yet."""
    generation: int = 0
    """0: not a member yet; the founders' first is 1."""
    rank: int = 0
    size: int = 0
    step: int = 0
    """The step under way, or the next one."""
    phase: int = Phase.STARTING
    since_ns: int = 0
    """When the phase began."""
    detail_a: int = 0
    """While REDUCING: the number of the bucket, from 0. While AWAITING: which `Collective`."""
    detail_b: int = 0
    """While REDUCING: how many buckets there are."""
    usual_step_ns: int = 0
    """The worker's own median step; 0 until it is learned."""
    committed_ns: int = 0
    """When the last step was committed; 0: none was."""
    num_lanes: int = 0
    data_ns: int = 0
    """What the time went into, up to the last commit. See Note [Where the time goes]."""
    compute_ns: int = 0
    waiting_ns: int = 0
    patient_until_ns: int = 0
    """Until then the worker is not reported as late (`run.patience`)."""
    saved: int = 0
    """1: the worker has saved the run because it is about to end."""
    traits: int = 0
    memory_bytes: int = 0
    """The process's own memory, resident; 0 until it is known."""
    gpu_bytes: int = 0
    """What torch holds of the worker's GPU."""

    @property
    def has_started(self) -> bool:
        """Whether the worker has called `lockstep.start`."""
        return self.pid > 0

    @property
    def updated_ns(self) -> int:
        """When the worker last wrote its row."""
        return max(self.since_ns, self.committed_ns)

    @property
    def is_member(self) -> bool:
        return self.generation >= 1

    @property
    def is_waiting(self) -> bool:
        """Whether the worker waits for others."""
        return self.phase in (Phase.REDUCING, Phase.RECOVERING, Phase.AWAITING)

    @property
    def is_ending(self) -> bool:
        """Whether the worker has closed its run, so that it admits no joiner any more."""
        return self.phase == Phase.ENDED or (self.phase == Phase.AWAITING and self.detail_a == Collective.END)

    @property
    def is_in_run(self) -> bool:
        """Whether the worker takes part in a run that it has not closed."""
        return self.is_member and not self.is_ending


class StatusReader:
    """Reads the whole page, in any process."""

    def __init__(self, fd: int, prot: int = mmap.PROT_READ) -> None:
        self._memory = mmap.mmap(fd, _PAGE_BYTES, prot=prot)

    def rows(self) -> dict[int, StatusRow]:
        rows = enumerate(_ROW.iter_unpack(self._memory))
        return {slot: StatusRow(*row) for slot, row in rows if row[PID] > 0}

    def close(self) -> None:
        self._memory.close()


class StatusPage(StatusReader):
    """Owns the page, and its `fd`, which workers inherit."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("lockstep-status")
        os.ftruncate(self.fd, _PAGE_BYTES)
        super().__init__(self.fd, mmap.PROT_READ | mmap.PROT_WRITE)

    def row(self, slot: int) -> StatusRow:
        _check(slot)
        seen = _ROW.unpack_from(self._memory, slot * _ROW.size)
        for _ in range(_MOST_LOOKS):
            again = _ROW.unpack_from(self._memory, slot * _ROW.size)
            if again == seen:
                break
            seen = again
        return StatusRow(*seen)

    def clear(self, slot: int) -> None:
        """Empties the row, before a new process gets the slot."""
        self._overwrite(slot, pid=0)

    def give_up(self, slot: int) -> None:
        """Marks the slot as empty for good."""
        self._overwrite(slot, pid=NOBODY)

    def _overwrite(self, slot: int, pid: int) -> None:
        _check(slot)
        _ROW.pack_into(self._memory, slot * _ROW.size, pid, *[0] * (_FIELDS - 1))

    def close(self) -> None:
        super().close()
        os.close(self.fd)

    def __enter__(self) -> "StatusPage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StatusWriter:
    """One worker's row, which it alone writes, from any of its threads."""

    def __init__(self, fd: int, slot: int) -> None:
        self._memory = mmap.mmap(fd, _PAGE_BYTES)
        self._place: tuple[int, int, int, int] = (Phase.STARTING, 0, 0, 0)
        self._spent_ns = [0] * len(Phase)
        self._take_row(slot)

    def _take_row(self, slot: int) -> None:
        _check(slot)
        with memoryview(self._memory) as page, page.cast("q") as numbers:
            self._row = numbers[slot * _FIELDS : (slot + 1) * _FIELDS]
        self._row[GENERATION] = 0  # an earlier run of this process may have left its row
        self._row[COMMITTED_NS] = self._row[USUAL_STEP_NS] = self._row[TRAITS] = 0
        self._row[PHASE] = Phase.STARTING
        self._row[SINCE_NS] = self._counted_ns = time.monotonic_ns()
        self._row[PID] = os.getpid()

    def enter(self, phase: int, step: int, a: int = 0, b: int = 0) -> None:
        """The worker is in `phase` of `step` from now on."""
        row = self._row
        # The time comes first: a reader in between sees the old phase as young, never the new one as old.
        row[SINCE_NS] = now_ns = time.monotonic_ns()
        self._count(now_ns)
        self._place = (phase, step, a, b)
        row[STEP] = step
        row[DETAIL_A] = a
        row[DETAIL_B] = b
        row[PHASE] = phase

    @contextmanager
    def awaiting(self, call: Collective) -> Iterator[None]:
        """Inside, the worker is AWAITING; afterwards it is in the phase before, unless the wait failed."""
        before = self._place
        self.enter(Phase.AWAITING, self._row[STEP], call)
        yield
        self.enter(*before)

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Inside, the worker is not reported as late for so long. Of nested calls the longest counts."""
        before = self._row[PATIENT_UNTIL_NS]
        self._row[PATIENT_UNTIL_NS] = max(before, time.monotonic_ns() + int(seconds * 1e9))
        try:
            yield
        finally:
            self._row[PATIENT_UNTIL_NS] = before

    def saved(self) -> None:
        """Records that the run was saved because it ends."""
        self._row[SAVED] = 1

    def uses(self, memory_bytes: int, gpu_bytes: int) -> None:
        """Records how much memory the worker uses now."""
        self._row[MEMORY_BYTES] = memory_bytes
        self._row[GPU_BYTES] = gpu_bytes

    def is_given_up(self, slot: int) -> bool:
        """Whether the launcher has marked the slot as empty for good."""
        return bool(_ROW.unpack_from(self._memory, slot * _ROW.size)[PID] == NOBODY)

    def add_trait(self, trait: Trait) -> None:
        self._row[TRAITS] |= trait

    def move_to(self, slot: int) -> None:
        """This process is a copy: it writes the row of `slot` from now on, and keeps its traits."""
        traits = self._row[TRAITS]
        self._take_row(slot)
        self._row[TRAITS] = traits

    def place(self, generation: int, rank: int, size: int, endpoint_port: int, num_lanes: int) -> None:
        """Records the worker's place as a member. The generation is written last: it makes the rest valid."""
        row = self._row
        row[RANK] = rank
        row[SIZE] = size
        row[ENDPOINT_PORT] = endpoint_port
        row[NUM_LANES] = num_lanes
        row[GENERATION] = generation

    def committed(self, step: int, usual_step_ns: int, data_ns: int = 0) -> None:
        """Records that `step` is committed now. `data_ns` were spent on waiting for loaders so far."""
        row = self._row
        row[COMMITTED_NS] = now_ns = time.monotonic_ns()
        self._count(now_ns)
        row[USUAL_STEP_NS] = usual_step_ns
        row[DATA_NS] = data_ns
        row[COMPUTE_NS] = self._spent_ns[Phase.COMPUTING]
        row[WAITING_NS] = self._spent_ns[Phase.REDUCING] + self._spent_ns[Phase.AWAITING]
        row[STEP] = step + 1

    def _count(self, now_ns: int) -> None:
        """Adds the time since the last call to the present phase."""
        self._spent_ns[self._place[0]] += now_ns - self._counted_ns
        self._counted_ns = now_ns

    def close(self) -> None:
        """Unmaps the page; the row stays in it."""
        self._row.release()
        self._memory.close()


class NoStatus:
    """The status of a worker without a launcher: writes nothing."""

    def enter(self, phase: int, step: int, a: int = 0, b: int = 0) -> None:
        pass

    @contextmanager
    def awaiting(self, call: Collective) -> Iterator[None]:
        yield

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        yield

    def is_given_up(self, slot: int) -> bool:
        return True

    def close(self) -> None:
        pass

    def _ignore(self, *_: object, **__: object) -> None:
        pass

    saved = add_trait = move_to = place = committed = uses = _ignore


def _check(slot: int) -> None:
    if not 0 <= slot < MAX_SLOTS:
        raise ValueError(f"slot {slot} is not on the status page: it has slots 0 to {MAX_SLOTS - 1}")
