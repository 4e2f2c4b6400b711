"""Reductions one after the other, in the order they were submitted, while the caller goes on.

# Note [Tiny numbers]
# torch.set_flush_denormal holds for one thread. An addition on a thread without it could give other bits than the same
# addition in the caller's thread, where a single worker does it: so a job runs with its caller's setting.

# Note [Callbacks that wait]
# The callbacks of a job's future run on the thread that ran the job. One that submits another job and waits for it, as
# PowerSGD's does, would wait for its own thread. So a thread that submits or waits there first starts another, which
# takes the jobs from then on; the relieved one ends with its callback.
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
    """A job that was submitted."""

    def result(self) -> None:
        """Returns when it is done, or raises what it raised."""


class ReductionQueue(Protocol):
    """Runs jobs in order. After a job failed, later ones fail with the same error and do not run."""

    def submit(self, job: Job, after: Any = None) -> PendingReduction:
        """Queues a job. On a GPU its work waits for the event `after`; by default for all work so far."""

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

    def __init__(self, name: str = "lockstep-wire") -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None], bool] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held by the thread that runs a job
        self._failure: BaseException | None = None
        self._open: set[Future[None]] = set()
        self._threads: list[threading.Thread] = []  # the last one takes the jobs, the others were relieved

    def submit(self, job: Job, after: Any = None, *, now: bool = False) -> "Future[None]":
        """The future is done when the job has run. With `now`, this thread runs it if the queue is empty: waking the
        other would take longer than a small job.
        """
        done: Future[None] = Future()
        with self._lock:
            is_alone, failure = now and not self._open, self._failure
            self._open.add(done)
            if failure is None and is_alone:
                self._turn.acquire()
            elif failure is None:
                self._start()
                self._jobs.put((job, done, flushes_denormals()))
        if failure is not None:
            self._settle(done, failure)
        elif is_alone:
            self._run(job, done)
        return done

    def fail(self, failure: BaseException) -> None:
        """Fails all jobs with this error, the one under way too. For a job that waits and cannot be woken."""
        with self._lock:
            self._failure = self._failure or failure
            open_jobs = list(self._open)
        for done in open_jobs:
            self._settle(done, failure)

    def relieve(self) -> None:
        """Lets another thread take the jobs if this one is about to wait for one. See Note [Callbacks that wait]."""
        with self._lock:
            if self._takes_jobs():
                self._start()

    def close(self) -> None:
        """Ends the threads. Connections must be closed before, so that no job waits for ever."""
        self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a callback may close the queue
                thread.join(LEAVE_S if self._failure is not None else None)
        self.fail(Misuse("the wire was closed"))  # what was submitted too late

    def _start(self) -> None:
        """Starts a thread that takes the jobs, unless another one than this does."""
        if self._threads and not self._takes_jobs():
            return
        # A daemon: a worker that leaves by an exception must not wait for a peer that never answers.
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def _takes_jobs(self) -> bool:
        return self._threads[-1:] == [threading.current_thread()]

    def _work(self) -> None:
        flushes = flushes_denormals()
        while self._takes_jobs() and (entry := self._jobs.get()) is not None:
            job, done, flush = entry
            if flush != flushes:
                torch.set_flush_denormal(flush)
                flushes = flush
            self._turn.acquire()
            self._run(job, done)

    def _run(self, job: Job, done: "Future[None]") -> None:
        """Runs the job in this thread, which holds the turn, and releases the turn before it publishes the outcome."""
        error = self._failure
        if error is None and (error := self._attempt(job)) is not None:
            error, lasting = self._judge(error)
            with self._lock:
                self._failure = self._failure or lasting
        self._turn.release()
        self._settle(done, error)

    def _attempt(self, job: Job) -> BaseException | None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - the job's future has it
            return error
        return None

    def _judge(self, error: BaseException) -> tuple[BaseException, BaseException | None]:
        """The error of a job that raised `error`, and the error of later jobs; None if they run."""
        return error, error

    def _settle(self, done: "Future[None]", failure: BaseException | None) -> None:
        """Completes the job's future; the first outcome counts."""
        with self._lock:
            if done not in self._open:
                return
            self._open.discard(done)
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(failure)


def flushes_denormals() -> bool:
    """Whether this thread flushes denormal numbers to zero. See Note [Tiny numbers]."""
    return float(torch.mul(_TINY, 1.0)) == 0.0
