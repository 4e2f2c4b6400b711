"""Exchanges one after the other, in the order they were handed in, while the caller goes on."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

Job = Callable[[], None]


class Sequence(Protocol):
    """Runs jobs in order. After a job failed, later ones fail with the same error and do not run."""

    def submit(self, job: Job) -> "Future[None]": ...

    def close(self) -> None: ...


class Inline:
    """Runs each job at once, in the caller's thread: for a transport that never waits."""

    def submit(self, job: Job) -> "Future[None]":
        done: Future[None] = Future()
        job()
        done.set_result(None)
        return done

    def close(self) -> None:
        pass


class Background:
    """Runs jobs on a thread of its own, so that bytes move while the backward pass computes."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None]] | None] = queue.SimpleQueue()
        # A daemon: a worker that leaves by an exception must not wait for a peer that never answers.
        self._thread = threading.Thread(target=self._work, name="lockstep-wire", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> "Future[None]":
        done: Future[None] = Future()
        self._jobs.put((job, done))
        return done

    def close(self) -> None:
        """Ends the thread. The transport must have been closed, so that no job waits for ever."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        failure: BaseException | None = None
        while (entry := self._jobs.get()) is not None:
            job, done = entry
            failure = failure or _attempt(job)
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)


def _attempt(job: Job) -> BaseException | None:
    try:
        job()
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the job
        return error
    return None
