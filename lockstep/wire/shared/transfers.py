"""Sends and receives under way, and the order in which sends leave."""

from collections import deque
from typing import Protocol

import torch

from lockstep.errors import BadArgument, LockstepError


class Mover(Protocol):
    """Whoever moves transfers on."""

    def finish(self, transfer: "Transfer") -> None:
        """Returns when the transfer is done; raises what it failed with."""


class Transfer:
    """A message that this worker sends or receives: `moved` bytes of it so far, at `address`.

    What is `done` has moved or has failed with `error`, and is not touched again. `since` is when somebody began to
    wait for it. The tensor stays alive until then, whatever the caller does.
    """

    def __init__(self, by: Mover, tensor: torch.Tensor, memory: torch.Tensor, peers: tuple[int, ...], tag: int) -> None:
        self.tensor = tensor
        self.address = memory.data_ptr()
        self.num_bytes = tensor.nbytes
        self.peers = peers
        self.tag = tag
        self.moved = 0
        self.done = False
        self.error: LockstepError | None = None
        self.since: float | None = None
        self._by = by
        self._memory: torch.Tensor | None = memory

    def wait(self) -> None:
        """Returns when the tensor may be reused (send) or read (receive). Raises PeerGone if the peer died."""
        self._by.finish(self)


class Sending(Transfer):
    """A send. A tensor that is not plain memory of this process is copied first."""

    def __init__(self, by: Mover, tensor: torch.Tensor, target: int, tag: int) -> None:
        memory = tensor if _is_plain(tensor) else tensor.detach().cpu().resolve_conj().resolve_neg()
        super().__init__(by, tensor, memory, (target,), tag)


class Receiving(Transfer):
    """A receive from any of `peers`; `source` is the one it came from, known after `wait`."""

    def __init__(self, by: Mover, tensor: torch.Tensor, sources: tuple[int, ...], tag: int) -> None:
        memory = tensor if _is_plain(tensor) else torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
        super().__init__(by, tensor, memory, sources, tag)
        self.source: int | None = None

    def wait(self) -> None:
        super().wait()
        memory = self._memory
        if memory is not None and memory is not self.tensor:
            self.tensor.detach().copy_(memory.view(self.tensor.dtype).view(self.tensor.shape))
        self._memory = None


class Line:
    """Sends to one worker: those with one tag in the order they came, the tags in turn.

    So small talk does not stand behind a long message of another stream.
    """

    def __init__(self) -> None:
        self._by_tag: dict[int, deque[Sending]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_tag)

    def add(self, sending: Sending) -> None:
        self._by_tag.setdefault(sending.tag, deque()).append(sending)

    def first(self) -> Sending:
        """The send whose next chunk is to leave."""
        return next(iter(self._by_tag.values()))[0]

    def advance(self, finished: bool) -> None:
        """A chunk of the first send has left: it was its last one, or not. The next tag has its turn."""
        tag = next(iter(self._by_tag))
        sends = self._by_tag.pop(tag)
        if finished:
            sends.popleft()
        if sends:
            self._by_tag[tag] = sends

    def clear(self) -> None:
        self._by_tag.clear()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes at its address are its values."""
    if not tensor.is_contiguous():
        raise BadArgument("a message must be one contiguous piece of memory: call contiguous() first")
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()
