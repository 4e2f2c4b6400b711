"""Exchanges one after the other, in the order they were handed in, while the caller goes on.

# Note [Tiny numbers]
# torch.set_flush_denormal holds for one thread. An addition on a thread without it could give other bits than the same
# addition in the caller's thread, where a worker that is alone does it: so a job runs as its caller would have.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from lockstep.errors import Misuse

Job = Callable[[], None]

_TINY = torch.tensor(1e-40, device="cpu")

LEAVE_S = 0.5
"""How long a thread whose job failed may take to end; one that cannot be woken is left behind."""


class PendingReduction(Protocol):
    """A job that was handed in."""

    def result(self) -> None:
        """Returns when it is done, or raises what it raised."""


class ReductionQueue(Protocol):
    """Runs jobs in order. After a job failed, later ones fail with the same error and do not run."""

    def submit(self, job: Job, after: Any = None) -> PendingReduction:
        """`after` is an event of a GPU's stream, behind which the job's work belongs; by default all so far."""

    def close(self) -> None: ...


class InlineQueue:
    """Runs each job at once, in the caller's thread: for a transport that never waits."""

    def submit(self, job: Job, after: Any = None) -> "Future[None]":
        done: Future[None] = Future()
        job()
        done.set_result(None)
        return done

    def close(self) -> None:
        pass


class ThreadQueue:
    """Runs jobs on a thread of its own, so that bytes move while the backward pass computes."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None], bool] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._open: set[Future[None]] = set()
        # A daemon: a worker that leaves by an exception must not wait for a peer that never answers.
        self._thread = threading.Thread(target=self._work, name="lockstep-wire", daemon=True)
        self._thread.start()

    def submit(self, job: Job, after: Any = None) -> "Future[None]":
        done: Future[None] = Future()
        with self._lock:
            self._open.add(done)
            failure = self._failure
        if failure is None:
            self._jobs.put((job, done, flushes_denormals()))
        else:
            self._settle(done, failure)
        return done

    def fail(self, failure: BaseException) -> None:
        """All jobs, the one under way too, fail with this error. For a job that waits and cannot be woken."""
        with self._lock:
            self._failure = self._failure or failure
            open_jobs = list(self._open)
        for done in open_jobs:
            self._settle(done, failure)

    def close(self) -> None:
        """Ends the thread. The transport must have been closed, so that no job waits for ever."""
        self._jobs.put(None)
        self._thread.join(LEAVE_S if self._failure is not None else None)
        self.fail(Misuse("the wire was closed"))  # what was handed in too late

    def _work(self) -> None:
        flushes = flushes_denormals()
        while (entry := self._jobs.get()) is not None:
            job, done, wanted = entry
            if wanted != flushes:
                torch.set_flush_denormal(wanted)
                flushes = wanted
            failure = self._failure or _attempt(job)
            if failure is not None:
                with self._lock:
                    self._failure = self._failure or failure
            self._settle(done, failure)

    def _settle(self, done: "Future[None]", failure: BaseException | None) -> None:
        """Tells whoever waits for a job how it ended; the first word counts."""
        with self._lock:
            if done not in self._open:
                return
            self._open.discard(done)
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(failure)


def flushes_denormals() -> bool:
    """Whether this thread takes tiny numbers for zero. See Note [Tiny numbers]."""
    return float(torch.mul(_TINY, 1.0)) == 0.0


def _attempt(job: Job) -> BaseException | None:
    try:
        job()
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the job
        return error
    return None
