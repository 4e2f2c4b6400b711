"""Send and receive between two members.

# Note [Messages without a waiting thread]
# Messages move while a thread of this process waits for one (Note [Waiting threads move]). A process that has begun a
# receive and then waits in a collective, while its peer waits for the message to be sent, would wait for ever. So a
# thread that is about to wait elsewhere first passes the open messages to another thread, which waits for them.
#
# A future has a thread of its own: it must be done as soon as its message has arrived, whatever else is still open, and
# its callbacks may wait for other messages.
"""

import queue
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from lockstep.errors import BadArgument, Disagreement, LockstepError
from lockstep.torch_backend.call import unwritable
from lockstep.torch_backend.flat import FlatTensor, flat
from lockstep.torch_backend.work import Operation, with_global_ranks
from lockstep.wire.shared.mailbox import Mailbox
from lockstep.wire.shared.transfers import Receiving, Transfer


class Messages:
    """The messages of one group. Any thread. Its owner calls `close` after the connections were closed."""

    def __init__(self, mailbox: Mailbox, global_ranks: Sequence[int]) -> None:
        self.global_ranks = global_ranks
        self._mailbox = mailbox
        self._open: list[Parcel] = []
        self._handed: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._watching: list[threading.Thread] = []
        self._lock = threading.Lock()
        _all.add(self)

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> "MessageWork":
        content = flat(tensor)
        return self._message(self._mailbox.send(content.elements, target, tag), content, [tensor])

    def receive(self, tensor: torch.Tensor, sources: Sequence[int], tag: int) -> "MessageWork":
        content = flat(tensor)
        transfer = self._mailbox.receive_any(content.elements, tag, sources)
        return self._message(transfer, content, [tensor], written=True)

    def hand_over(self) -> None:
        """Lets a thread wait for the open messages. See Note [Messages without a waiting thread]."""
        with self._lock:
            handed = [parcel for parcel in self._open if not parcel.transfer.done]
            self._open = []
            if handed and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="lockstep-messages", daemon=True)
                self._thread.start()
        for each in handed:
            self._handed.put(each)

    def watch(self, parcel: "Parcel", done: "Future[None]") -> None:
        """Completes the future when the message is done."""
        thread = threading.Thread(target=parcel.settle, args=(done,), name="lockstep-message", daemon=True)
        with self._lock:
            self._watching = [*(other for other in self._watching if other.is_alive()), thread]
            thread.start()

    def close(self) -> None:
        _all.discard(self)
        self._mailbox.close()
        self._handed.put(None)
        for thread in [*self._watching, *([self._thread] if self._thread is not None else [])]:
            if thread is not threading.current_thread():  # a callback may end the group
                thread.join()

    def _message(
        self, transfer: Transfer, content: FlatTensor, tensors: list[torch.Tensor], *, written: bool = False
    ) -> "MessageWork":
        parcel = Parcel(self, transfer, content if written else None)
        hand_over_all(but=self)
        if not transfer.done:
            with self._lock:
                self._open = [*(parcel for parcel in self._open if not parcel.transfer.done), parcel]
        return MessageWork(parcel, tensors)

    def _work(self) -> None:
        while (parcel := self._handed.get()) is not None:
            with suppress(LockstepError):  # its waiters raise it
                parcel.finish()


class Parcel:
    """A message under way: its transfer, and where its content goes when it has arrived."""

    def __init__(self, messages: Messages, transfer: Transfer, content: FlatTensor | None) -> None:
        self.transfer = transfer
        self._messages = messages
        self._content = content
        self._lock = threading.Lock()
        self._done: Future[None] | None = None

    def finish(self) -> None:
        """Waits until the message has been delivered; raises its error if it failed."""
        try:
            self.transfer.wait()
        except Disagreement as error:
            ranks = self._messages.global_ranks
            raise replace(error, here=ranks[error.here], there=ranks[error.there]) from error
        except LockstepError as error:
            raise with_global_ranks(error, self._messages.global_ranks) from error
        with self._lock:
            content, self._content = self._content, None
            if content is not None:
                with torch.inference_mode():  # see Note [Tensors of inference mode]
                    content.finish()

    def future(self) -> "Future[None]":
        """Done when the message has been delivered, whether a thread waits or not."""
        with self._lock:
            if self._done is None:
                self._done = Future()
                self._messages.watch(self, self._done)
            return self._done

    def settle(self, done: "Future[None]") -> None:
        """Waits, then completes the future."""
        try:
            self.finish()
        except LockstepError as error:
            done.set_exception(error)
        else:
            done.set_result(None)


class MessageWork(Operation):
    """A message under way. The thread that waits for it moves it."""

    def __init__(self, parcel: Parcel, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__(Future(), outputs)
        self._parcel = parcel

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if timeout.total_seconds() > 0:
            self._done = self._parcel.future()
            return super().wait(timeout)
        self._parcel.finish()
        return True

    def is_completed(self) -> bool:
        return self._parcel.transfer.done

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return self._parcel.transfer.error

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self._done = self._parcel.future()
        return super().get_future()

    def source_rank(self) -> int:
        """The group rank that a received message came from."""
        transfer = self._parcel.transfer
        assert isinstance(transfer, Receiving)
        return transfer.peers[0] if transfer.source is None else transfer.source

    _source_rank = source_rank


_all: "weakref.WeakSet[Messages]" = weakref.WeakSet()


def hand_over_all(*, but: Messages | None = None) -> None:
    """Called before this process waits for something else. See Note [Messages without a waiting thread]."""
    for messages in list(_all):
        if messages is not but:
            messages.hand_over()


def check_message(tensors: Sequence[torch.Tensor], *, written: bool = False) -> torch.Tensor:
    """The one tensor of a message, if it can be sent from here, or `written` here."""
    (tensor,) = tensors
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise BadArgument(f"a message must be a dense tensor on the CPU, not {tensor.layout} on {tensor.device}")
    if written and (fault := unwritable([tensor])):
        raise BadArgument(fault)
    return tensor
