"""Operations under way: the queue that runs them, and the objects that a caller of torch.distributed waits for.

# Note [Errors in torch's futures]
# `torch.futures.Future.set_exception` stores the error as a value that only Python knows to raise; DDP's reducer,
# which is C++, would take it for tensors. What a callback raises, however, is an error in C++ too. So callers get the
# future of a callback that raises the error or returns the tensors.

# Note [Tensors of inference mode]
# A tensor that was made in torch.inference_mode can be written in that mode only, and the mode belongs to a thread:
# the caller's is not the group's own. All jobs therefore run in that mode, in which tensors made elsewhere can be
# written too. Memory that a job makes and a later one uses is always used in the mode it was made in.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistBackendError, Work  # type: ignore[attr-defined]

from lockstep.errors import BadArgument, Disagreement, LockstepError, Misuse, PeerGone
from lockstep.wire.reduction_queue import Job, ThreadQueue

SHARED = (Disagreement, BadArgument)
"""Errors that all members raise at the same call, after which the group stays usable. All others end it."""


class RankGone(PeerGone, DistBackendError):  # noqa: N818
    """A member stopped answering: also a RuntimeError, as scripts expect of a backend. `rank` is the global one."""


def with_global_ranks(error: BaseException, global_ranks: Sequence[int]) -> BaseException:
    """The error as the caller should see it: a group's own ranks mean nothing outside of it."""
    if isinstance(error, PeerGone) and not isinstance(error, RankGone):
        gone = RankGone(global_ranks[error.rank], error.cause)
        gone.__cause__ = error
        return gone
    return error


class OperationQueue(ThreadQueue):
    """Operations of one group, in the order of the calls. Any thread.

    After an error that not all members share, it calls `fail_group`, and later operations fail with its error.
    """

    def __init__(self, fail_group: Callable[[BaseException], BaseException]) -> None:
        super().__init__("lockstep-backend")
        self._fail_group = fail_group
        self._closed = False

    def submit(self, job: Job, after: Any = None, *, now: bool = False) -> "Future[None]":
        if self._closed:
            raise Misuse("this process group was destroyed: make a new one with init_process_group or new_group")
        return super().submit(job, after, now=now)

    def close(self) -> None:
        self._closed = True
        super().close()

    def _attempt(self, job: Job) -> BaseException | None:
        with torch.inference_mode():  # see Note [Tensors of inference mode]
            return super()._attempt(job)

    def _judge(self, error: BaseException) -> tuple[BaseException, BaseException | None]:
        if isinstance(error, SHARED):
            return error, None
        error = self._fail_group(error)
        return error, error if isinstance(error, Exception) else _interrupted(error)


def _interrupted(error: BaseException) -> Misuse:
    """The error of later operations: a caller that has caught an interrupt must not be interrupted again."""
    what = f"an operation of this process group was interrupted ({type(error).__name__}), which ended the group"
    return Misuse(f"{what}: make a new one with init_process_group or new_group")


class OperationTimeout(LockstepError, TimeoutError, RuntimeError):  # noqa: N818
    """The timeout of `wait` has passed; the operation goes on."""


class Operation(Work):  # type: ignore[misc]
    """A collective under way, and the tensors it writes. `relieve` is called before a thread waits for it."""

    def __init__(
        self, done: "Future[None]", outputs: Sequence[torch.Tensor], relieve: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._relieve = relieve
        self._done = done
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the outputs may be read and the inputs reused; raises the operation's error if it failed."""
        limit_s = timeout.total_seconds()
        if not self._done.done():
            self._relieve()
        try:
            self._done.result(limit_s if limit_s > 0 else None)
        except TimeoutError as error:
            if self._done.done():
                raise
            raise OperationTimeout(f"the operation has not ended within {limit_s:g} s; it goes on") from error
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def is_success(self) -> bool:
        return self._done.done() and self._done.exception() is None

    def exception(self) -> Any:
        return self._done.exception() if self._done.done() else None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the outputs. See Note [Errors in torch's futures]."""
        if not self._done.done():
            self._relieve()
        ended: torch.futures.Future[None] = torch.futures.Future()
        outputs = ended.then(lambda _: self._value())
        self._done.add_done_callback(lambda _: ended.set_result(None))
        return outputs

    def _value(self) -> list[torch.Tensor]:
        self._done.result()
        return self._outputs
