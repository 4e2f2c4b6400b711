"""The seam between the supervisor and what starts workers: `WorkerPool`. The first variant is `LocalPool`.

A variant may run workers on other hosts, so nothing here is a process number, a file descriptor or a path of this host.
A worker has a slot, and an id that no other worker of the pool ever has.
"""

import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from lockstep.launch.channels.failure import Failure
from lockstep.launch.channels.status import StatusRow
from lockstep.launch.channels.traceback_lines import Frame
from lockstep.launch.host.processes import Activity
from lockstep.launch.host.signals import LauncherSignals
from lockstep.launch.job import Job


@dataclass(frozen=True)
class ExitStatus:
    """How a worker ended: `kind` is its exit code, or the name of the signal that killed it.

    `reason` is why it was killed, where the pool knows.
    """

    kind: str
    is_killed: bool = False
    reason: str = ""

    @classmethod
    def of(cls, code: int, is_for_memory: Callable[[], bool]) -> "ExitStatus":
        """From the exit code of a process, or minus the signal that killed it."""
        if code >= 0:
            return cls(str(code))
        kind = next((signum.name for signum in signal.Signals if signum == -code), f"signal {-code}")
        return cls(kind, True, "out of memory" if kind == "SIGKILL" and is_for_memory() else "")

    @property
    def is_clean(self) -> bool:
        return self.kind == "0" and not self.is_killed


@dataclass(frozen=True)
class WorkerEvent:
    """A worker has reported a failure (`report`), or has ended (`status`), or both.

    `time_s` is when it ended, on the monotonic clock of the launcher's host.
    """

    slot: int
    id: str
    report: Failure | None
    status: ExitStatus | None = None
    time_s: float = 0.0


class StackQuery(Protocol):
    """A pending query for a worker's stack."""

    def answer(self) -> Frame | None:
        """The innermost call in user code; None until the worker has answered. Never waits."""


class WorkerPool(Protocol):
    """Starts the workers of one launch, follows them and ends them.

    The pool is a context manager. Its methods may be called only inside the context, by the thread that entered it.
    The exit leaves nothing of any worker, whatever happened inside. Only `wait`, `end_all` and starting workers may
    take time. The pool writes every worker's output to its log, and that of `speaking_slot` also to `show`.
    """

    @property
    def running(self) -> Mapping[int, str]:
        """The ids of the workers that have not ended, by slot. It changes only during calls of this object."""

    @property
    def obstacles(self) -> Collection[str]:
        """Why live workers could not be copied, each reason once; empty if the pool makes no copies."""

    def start(self, num_workers: int, resume: str | None = None) -> None:
        """Starts the founders of the run, in slots from 0. May be called only while no worker runs.

        `resume` overrides the job's own setting. Raises BadEnvironment if a worker cannot be started.
        """

    def replace(self, slot: int, endpoints: tuple[str, ...], num_workers: int) -> None:
        """Kills what still runs in the slot, and starts a worker there that joins through one of the `endpoints`.

        The new worker need not be in `running` when this returns. Raises BadEnvironment if it cannot be started.
        """

    def keep_spares(self, number: int) -> None:
        """Starts or ends spares until `number` of them wait for `replace`. One that cannot be started is left out."""

    def wait(self, within_s: float) -> list[WorkerEvent]:
        """Passes output on, and waits for the first event, at most `within_s`. Returns all events since the last call.

        A signal to the launcher ends the wait early, without an event. A worker's end is reported once, and not at all
        if `replace` or `end_all` ended it.
        """

    def send(self, slot: int, signum: signal.Signals) -> None:
        """Sends the signal to the worker, unless it has ended."""

    def end(self, slot: int) -> None:
        """Kills the worker and all that it has started; a replacement that has not started yet is cancelled."""

    def end_all(self) -> None:
        """Kills all workers. Afterwards no process of theirs is left, and their logs are complete."""

    def row(self, slot: int) -> StatusRow:
        """The status row of the worker in `slot`, or of the last one there."""

    def rows(self) -> Mapping[int, StatusRow]:
        """The rows of all workers that have called `lockstep.start`, by slot."""

    def give_up(self, slot: int) -> None:
        """Marks the slot on the status page as empty for good. Does nothing while a worker runs there."""

    def state(self, slot: int) -> str:
        """The kernel's state letter for the running worker's process; "" where that is not known."""

    def activity(self, slot: int) -> Activity | None:
        """What the running worker and its children have done until now; None where that is not known."""

    def ask_stack(self, slot: int) -> StackQuery | None:
        """Queries the running worker's stack; None if it cannot answer."""


OpenPool = Callable[
    [Job, Callable[[bytes], None], Callable[[str], None], LauncherSignals], AbstractContextManager[WorkerPool]
]
"""Makes the pool for a job, from `show` (output), `say` (messages) and the launcher's signals."""


def speaking_slot(rows: Mapping[int, StatusRow]) -> int | None:
    """The slot whose output is shown: that of rank 0 in the newest generation, if it is there."""
    newest = max((row.generation for row in rows.values()), default=0)
    ranks = {row.rank: slot for slot, row in rows.items() if row.generation == newest}
    return ranks.get(0) if newest else None
