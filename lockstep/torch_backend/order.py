"""Operations of one group, one after the other, in the order in which they were asked for.

# Note [Whose thread]
# Whoever asks for an operation and waits for it at once may as well carry it out: no other thread has to wake up,
# which takes longer than a small operation. That is done if nothing else is under way. An asynchronous operation runs
# on a thread of the group's own, which is started when the first one comes.

# Note [Callbacks that wait]
# The callbacks of an operation's future run on the thread that ended the operation. One that asks for another
# operation of the group and waits for it, as PowerSGD's does, would wait for its own thread. So whoever asks or waits
# on that thread first starts another, which takes the jobs from then on; the relieved one ends with its callback.

# Note [Tensors of inference mode]
# A tensor that was made in torch.inference_mode can be written in that mode only, and the mode belongs to a thread:
# the caller's is not the group's own. All jobs therefore run in it, whatever they write. In it, tensors that were made
# elsewhere can be written too; memory that a job makes and a later one uses is always met in the mode it was made in.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from lockstep.errors import Misuse
from lockstep.torch_backend.failures import SHARED

Job = Callable[[], None]
Entry = tuple[Job, "Future[None]"]


class OperationQueue:
    """Any thread. After an error that not all members share, `fail` was called and later jobs fail with its error."""

    def __init__(self, fail: Callable[[BaseException], BaseException]) -> None:
        self._fail = fail
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._num_open = 0
        self._closed = False
        self._jobs: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []  # the last one takes the jobs, the others were relieved

    def submit(self, job: Job, *, now: bool) -> "Future[None]":
        """The job has run when the future is done; with `now` perhaps when this returns. See Note [Whose thread]."""
        done: Future[None] = Future()
        with self._lock:
            alone = now and self._num_open == 0
            if self._closed:
                raise Misuse("this process group was destroyed: make a new one with init_process_group or new_group")
            self._num_open += 1
            if alone:
                self._turn.acquire()
            else:
                self._start()
                self._jobs.put((job, done))
        if alone:
            self._run(job, done)
        return done

    def close(self) -> None:
        """Ends the thread. The connections must have been closed, so that no job waits for ever."""
        with self._lock:
            self._closed = True
            threads = self._threads
        self._jobs.put(None)
        for thread in threads:
            if thread is not threading.current_thread():  # a callback may end the group
                thread.join()

    def relieve(self) -> None:
        """Jobs go on although this thread is about to wait for one. See Note [Callbacks that wait]."""
        with self._lock:
            if self._takes_jobs():
                self._start()

    def _start(self) -> None:
        """Jobs are taken by a thread that is not this one."""
        if self._threads and not self._takes_jobs():
            return
        thread = threading.Thread(target=self._work, name="lockstep-backend", daemon=True)
        self._threads = [*(found for found in self._threads if found.is_alive()), thread]
        thread.start()

    def _takes_jobs(self) -> bool:
        """Whether it is this thread that takes the jobs."""
        return self._threads[-1:] == [threading.current_thread()]

    def _work(self) -> None:
        while self._takes_jobs() and (entry := self._jobs.get()) is not None:
            self._turn.acquire()
            self._run(*entry)

    def _run(self, job: Job, done: "Future[None]") -> None:
        """Runs the job in this thread, whose turn it is, and ends the turn before anybody hears of the outcome."""
        error = self._failure or _attempt(job)
        if error is not None and self._failure is None and not isinstance(error, SHARED):
            error = self._fail(error)
            self._failure = error if isinstance(error, Exception) else _interrupted(error)
        with self._lock:
            self._num_open -= 1
            self._turn.release()
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def _attempt(job: Job) -> BaseException | None:
    try:
        with torch.inference_mode():  # see Note [Tensors of inference mode]
            job()
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the job
        return error
    return None


def _interrupted(error: BaseException) -> Misuse:
    """What later jobs fail with: whoever has caught an interrupt must not be interrupted again."""
    told = f"an operation of this process group was interrupted ({type(error).__name__}), which ended the group"
    return Misuse(f"{told}: make a new one with init_process_group or new_group")
