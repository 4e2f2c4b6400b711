"""Sends and receives under way: the order in which sends leave, and which message belongs to which receive.

# Note [Matching]
# A message belongs to the first receive posted with its tag that takes messages of its source. Its bytes are copied
# straight to that receive's tensor. If there is none yet they are kept in private memory, and the first such receive
# that is posted takes the first such message, even one of which only a part has arrived: the rest is copied straight.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from lockstep.errors import GO_THE_SAME_WAY, BadArgument, Disagreement, LockstepError
from lockstep.wire.shared.channel import Chunk, copy

_Item = TypeVar("_Item")


class Mover(Protocol):
    """Moves transfers: the mailbox."""

    def finish(self, transfer: "Transfer") -> None:
        """Waits until the transfer is done; raises its error if it failed."""


class Transfer:
    """A message that this worker sends or receives: `moved` bytes of it so far, at `address`.

    When `done`, it has moved or has failed with `error`, and is not touched again; until then it keeps the tensor
    alive. `since` is when a thread began to wait for it.
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
        """See `Pending`."""
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

    So small messages do not wait behind a long one of another stream.
    """

    def __init__(self) -> None:
        self._by_tag: dict[int, deque[Sending]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_tag)

    def add(self, sending: Sending) -> None:
        self._by_tag.setdefault(sending.tag, deque()).append(sending)

    def first(self) -> Sending:
        """The send whose chunk is next."""
        return next(iter(self._by_tag.values()))[0]

    def advance(self, finished: bool) -> None:
        """A chunk of the first send was put, its last one if `finished`: the next tag has its turn."""
        tag = next(iter(self._by_tag))
        sends = self._by_tag.pop(tag)
        if finished:
            sends.popleft()
        if sends:
            self._by_tag[tag] = sends

    def clear(self) -> None:
        self._by_tag.clear()


@dataclass(eq=False)
class ArrivingMessage:
    """A message of which `arrived` bytes are here, at `place`; without a place its bytes are dropped."""

    source: int
    tag: int
    num_bytes: int
    arrived: int = 0
    place: int | None = None
    receiving: Receiving | None = None
    kept: torch.Tensor | None = None

    @property
    def is_whole(self) -> bool:
        return self.arrived == self.num_bytes

    def add(self, chunk: Chunk) -> None:
        if self.place is not None:
            copy(self.place + self.arrived, chunk.address, chunk.num_bytes)
        self.arrived += chunk.num_bytes

    def keep(self) -> None:
        """Keeps what arrives until a receive is posted for it."""
        self.kept = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")
        self.place = self.kept.data_ptr()

    def hand_to(self, receiving: Receiving) -> None:
        """Copies what has arrived to the receive's tensor; the rest will go there."""
        if self.place is not None:
            copy(receiving.address, self.place, self.arrived)
        self.receiving, self.place, self.kept = receiving, receiving.address, None

    def drop(self) -> None:
        self.receiving = self.place = self.kept = None


class Matching:
    """Receives that wait for messages, and messages that wait for receives. One thread at a time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._posted: dict[int, list[Receiving]] = {}
        self._aside: dict[int, list[ArrivingMessage]] = {}
        self._arriving: dict[tuple[int, int], ArrivingMessage] = {}

    def post(self, receiving: Receiving) -> bool:
        """The receive takes a kept message, or waits for one. Returns whether that ended it."""
        aside = self._aside.get(receiving.tag, [])
        arrival = next((arrival for arrival in aside if arrival.source in receiving.peers), None)
        if arrival is None:
            self._posted.setdefault(receiving.tag, []).append(receiving)
            return False
        _remove(self._aside, receiving.tag, arrival)
        return not self._join(arrival, receiving) or arrival.is_whole

    def withdraw(self, receiving: Receiving) -> None:
        """The receive takes no message any more; the rest of one that it has begun to take is dropped."""
        if receiving in self._posted.get(receiving.tag, ()):
            _remove(self._posted, receiving.tag, receiving)
        for arrival in self._arriving.values():
            if arrival.receiving is receiving:
                arrival.drop()

    def take(self, source: int, chunk: Chunk) -> Receiving | None:
        """Copies the chunk's bytes to their place. Returns the receive that this ended, if it did."""
        refused = None
        arrival = self._arriving.get((source, chunk.tag))
        if arrival is None:
            arrival, refused = self._begin(source, chunk)
        arrival.add(chunk)
        if not arrival.is_whole:
            self._arriving[source, chunk.tag] = arrival
            return refused
        self._arriving.pop((source, chunk.tag), None)
        return refused or arrival.receiving

    def _begin(self, source: int, chunk: Chunk) -> tuple[ArrivingMessage, Receiving | None]:
        """Begins a message; returns it with the receive that refused it, if one did."""
        arrival = ArrivingMessage(source, chunk.tag, chunk.message_bytes)
        posted = self._posted.get(chunk.tag, [])
        receiving = next((receiving for receiving in posted if source in receiving.peers), None)
        if receiving is None:
            arrival.keep()
            self._aside.setdefault(chunk.tag, []).append(arrival)
            return arrival, None
        _remove(self._posted, chunk.tag, receiving)
        return arrival, None if self._join(arrival, receiving) else receiving

    def _join(self, arrival: ArrivingMessage, receiving: Receiving) -> bool:
        """The receive takes the message, or refuses it because the sizes differ."""
        receiving.source = arrival.source
        if arrival.num_bytes == receiving.num_bytes:
            arrival.hand_to(receiving)
            return True
        arrival.drop()
        receiving.error = Disagreement(
            f"bytes of a message with tag {receiving.tag}",
            here=self._rank,
            mine=str(receiving.num_bytes),
            there=arrival.source,
            theirs=str(arrival.num_bytes),
            advice=GO_THE_SAME_WAY,
        )
        return False


def _remove(lists: dict[int, list[_Item]], tag: int, item: _Item) -> None:
    lists[tag].remove(item)
    if not lists[tag]:
        del lists[tag]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes at its address are its values."""
    if not tensor.is_contiguous():
        raise BadArgument("a message must be one contiguous piece of memory: call contiguous() first")
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()
