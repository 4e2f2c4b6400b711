"""The seam between the supervisor and what starts workers: `WorkerPool`. The first variant is `LocalPool`.

A variant may run workers on other hosts, so nothing here is a process number, a file descriptor or a path of this host.
A worker is known by its slot, and by an id that no other worker of the pool ever has.
"""

import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from lockstep.launch.failure import Failure
from lockstep.launch.job import Job
from lockstep.launch.process_stats import Activity
from lockstep.launch.signals import LauncherSignals
from lockstep.launch.status import StatusRow
from lockstep.launch.traceback_lines import Frame
from lockstep.settings.environments.lockstep_run import Doors


@dataclass(frozen=True)
class ExitStatus:
    """How a worker ended: `kind` is its exit code, or the name of the signal that killed it.

    `reason` says why it was killed, where the pool knows.
    """

    kind: str
    is_killed: bool = False
    reason: str = ""

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
    """A worker that was asked where it is in its code."""

    def answer(self) -> Frame | None:
        """The innermost call in user code; None while there is no answer. Never waits."""


class WorkerPool(Protocol):
    """The workers of one launch: started, followed, ended, cleared away.

    A context manager: everything below may be called only inside, by the thread that entered it. When it is left,
    nothing of any worker remains, whatever happened inside. Only `wait`, `end_all` and starting workers may take time.

    The output of the worker that speaks (`speaking_slot`) goes to the pool's `show`, that of all workers to their logs.
    """

    @property
    def running(self) -> Mapping[int, str]:
        """The ids of the workers that have not ended, by slot. What it holds changes only in calls of this object."""

    @property
    def obstacles(self) -> Collection[str]:
        """Why workers that live could not be copied, each reason once; empty if the pool makes no copies."""

    def start(self, num_workers: int, resume: str | None = None) -> None:
        """Starts the workers that found the run, in slots from 0. Only while none runs: at first, or after `end_all`.

        `resume` goes over the job's own setting. Raises BadEnvironment if a worker cannot be started.
        """

    def replace(self, slot: int, doors: Doors, num_workers: int) -> None:
        """Starts a worker that asks the members behind the doors to admit it. What still runs in the slot is killed.

        The new worker need not be in `running` when this returns. Raises BadEnvironment if it cannot be started.
        """

    def keep_spares(self, number: int) -> None:
        """So many spares stand by for `replace`, as far as they can be started; 0 ends those that do."""

    def wait(self, within_s: float) -> list[WorkerEvent]:
        """What has happened since the last call, and until then: returns with the first news, or after `within_s`.

        Passes output on meanwhile. Returns early, with no event, when the launcher has got a signal. A worker's end is
        reported once, and not at all if `replace` or `end_all` ended it.
        """

    def send(self, slot: int, signum: signal.Signals) -> None:
        """The worker gets the signal; one that has ended already gets nothing."""

    def end(self, slot: int) -> None:
        """The worker, and all that it has started, is killed; a worker on its way into the slot is called off."""

    def end_all(self) -> None:
        """Kills all workers. Afterwards no process of theirs is left, and their logs are complete."""

    def row(self, slot: int) -> StatusRow:
        """What the worker in `slot`, or the last one there, has written of itself."""

    def rows(self) -> Mapping[int, StatusRow]:
        """The rows of all workers that have called `lockstep.start`, by slot."""

    def give_up(self, slot: int) -> None:
        """The workers learn that nobody will come in this slot any more. Does nothing while a worker runs there."""

    def state(self, slot: int) -> str:
        """The letter that the kernel of its host gives the running worker's process; "" where that is not known."""

    def activity(self, slot: int) -> Activity | None:
        """What the running worker and all that it has started have done until now; None where that is not known."""

    def ask_stack(self, slot: int) -> StackQuery | None:
        """Asks the running worker where it is in its code; None if it cannot be asked."""


OpenPool = Callable[
    [Job, Callable[[bytes], None], Callable[[str], None], LauncherSignals], AbstractContextManager[WorkerPool]
]
"""Makes the pool for a job. It is given where shown output goes, where messages go, and the launcher's signals."""


def speaking_slot(rows: Mapping[int, StatusRow]) -> int | None:
    """The slot of the member with rank 0 in the newest generation, if it is there: its output is shown."""
    newest = max((row.generation for row in rows.values()), default=0)
    ranks = {row.rank: slot for slot, row in rows.items() if row.generation == newest}
    return ranks.get(0) if newest else None
