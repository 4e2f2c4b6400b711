"""What a caller of torch.distributed waits for.

# Note [Errors in torch's futures]
# `torch.futures.Future.set_exception` stores the error as a value that only Python knows to raise; DDP's reducer,
# which is C++, would take it for tensors. What a callback raises, however, is an error in C++ too. So the future that
# is handed out is the one of a callback that raises or gives the tensors.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Work  # type: ignore[attr-defined]

from lockstep.errors import LockstepError
from lockstep.wire.shared.transfers import Receiving, Transfer


class OperationTimeout(LockstepError, TimeoutError, RuntimeError):  # noqa: N818
    """`wait` was given a time, and it is over; the operation goes on."""


class Operation(Work):  # type: ignore[misc]
    """A collective under way, and the tensors it writes. `relieve` is called by whoever is about to wait for it."""

    def __init__(
        self, done: "Future[None]", outputs: Sequence[torch.Tensor], relieve: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._relieve = relieve
        self._done = done
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the outputs may be read and the inputs reused; raises what the operation failed with."""
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
        told = ended.then(lambda _: self._value())
        self._done.add_done_callback(lambda _: ended.set_result(None))
        return told

    def _value(self) -> list[torch.Tensor]:
        self._done.result()
        return self._outputs


class Delivery(Protocol):
    """A message that somebody carries."""

    transfer: Transfer

    def finish(self) -> None:
        """Returns when the message has been delivered; raises what it failed with."""

    def future(self) -> "Future[None]":
        """Done when the message has been delivered, whether somebody waits or not."""


class MessageWork(Operation):
    """A message under way. Whoever waits for it moves it on itself."""

    def __init__(self, delivery: Delivery, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__(Future(), outputs)
        self._delivery = delivery

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if timeout.total_seconds() > 0:
            self._done = self._delivery.future()
            return super().wait(timeout)
        self._delivery.finish()
        return True

    def is_completed(self) -> bool:
        return self._delivery.transfer.done

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return self._delivery.transfer.error

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self._done = self._delivery.future()
        return super().get_future()

    def source_rank(self) -> int:
        """The group rank that a received message came from."""
        transfer = self._delivery.transfer
        assert isinstance(transfer, Receiving)
        return transfer.peers[0] if transfer.source is None else transfer.source

    _source_rank = source_rank
