"""Small messages: fixed-size records that every worker sends to every other.

# Note [Rounds of an exchange]
# Few workers send their records to each other directly: one round. Beyond MOST_DIRECT the W-1 messages of a worker cost
# more than the rounds that they save, so records travel in the rounds of Bruck et al. ("Efficient algorithms for
# all-to-all communications in multiport message-passing systems", 1997): in round r a worker receives all records that
# the worker 2^r ranks on has gathered, and has twice as many. No worker has more than log2(W) messages each way.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.wire.transport import CONTROL, Pending, Transport

MOST_DIRECT = 16
"""See Note [Rounds of an exchange]."""


class PendingExchange(Protocol):
    """An exchange under way; the records are flat uint8 tensors of one size."""

    def wait(self) -> list[torch.Tensor]:
        """Every worker's record, by rank."""


@dataclass
class DirectExchange:
    """All records are on their way."""

    mine: torch.Tensor
    rank: int
    sends: list[Pending]
    receives: dict[int, Pending]
    theirs: dict[int, torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        for pending in [*self.receives.values(), *self.sends]:
            pending.wait()
        return [record for _, record in sorted([(self.rank, self.mine), *self.theirs.items()])]


class GatheringExchange:
    """The first round is under way; the others follow when it is waited for."""

    def __init__(self, transport: Transport, record: torch.Tensor, tag: int) -> None:
        self._transport, self._tag = transport, tag
        self._size, self._bytes = transport.world.size, record.numel()
        self._records = record.new_empty(self._size * self._bytes)
        """That of this worker, then those of the workers after it, in order of their ranks."""
        self._records[: self._bytes].copy_(record)
        self._num_held = 1
        self._pending = self._begin_round()

    def wait(self) -> list[torch.Tensor]:
        while self._num_held < self._size:
            for pending in self._pending:
                pending.wait()
            self._num_held = min(2 * self._num_held, self._size)
            self._pending = self._begin_round()
        pieces, rank = self._records.split(self._bytes), self._transport.world.rank
        return [pieces[(other - rank) % self._size] for other in range(self._size)]

    def _begin_round(self) -> list[Pending]:
        held, size, rank = self._num_held, self._size, self._transport.world.rank
        number = min(held, size - held) * self._bytes
        if number == 0:
            return []
        place = self._records[held * self._bytes : held * self._bytes + number]
        receive = self._transport.receive(place, (rank + held) % size, self._tag)
        return [receive, self._transport.send(self._records[:number], (rank - held) % size, self._tag)]


def post(transport: Transport, record: torch.Tensor, tag: int = CONTROL) -> PendingExchange:
    """Starts to send `record` to all and to receive theirs; returns at once. See Note [Rounds of an exchange]."""
    world = transport.world
    if world.size > MOST_DIRECT:
        return GatheringExchange(transport, record, tag)
    theirs = {peer: torch.empty_like(record) for peer in world.peers}
    receives = {peer: transport.receive(place, peer, tag) for peer, place in theirs.items()}
    sends = [transport.send(record, peer, tag) for peer in world.peers]
    return DirectExchange(record, world.rank, sends, receives, theirs)


def exchange(transport: Transport, record: torch.Tensor, tag: int = CONTROL) -> list[torch.Tensor]:
    """Collective. Every worker's record, by rank."""
    return post(transport, record, tag).wait()


def exchange_with_peers(transport: Transport, make_record: Callable[[], bytes], tag: int = CONTROL) -> dict[int, bytes]:
    """Collective. Each peer's record, by rank, all of one length; `make_record` is called only if there are peers."""
    peers = transport.world.peers
    if not peers:
        return {}
    mine = make_record()
    records = exchange(transport, torch.frombuffer(bytearray(mine), dtype=torch.uint8), tag)
    return {peer: _read(records[peer], len(mine)) for peer in peers}


def exchange_texts(transport: Transport, text: str, tag: int = CONTROL) -> list[str]:
    """Collective. Every worker's text, by rank. Two rounds: the lengths, then the texts."""
    return [content.decode() for content in exchange_bytes(transport, text.encode(), tag)]


def exchange_bytes(transport: Transport, content: bytes, tag: int = CONTROL) -> list[bytes]:
    """Collective. Every worker's bytes, by rank, of any length. Two rounds: the lengths, then the bytes."""
    size = torch.tensor([len(content)], dtype=torch.int64, device="cpu")
    sizes = [int(record.view(torch.int64)) for record in exchange(transport, size.view(torch.uint8), tag)]
    padded = torch.frombuffer(bytearray(content.ljust(max(1, *sizes), b"\0")), dtype=torch.uint8)
    records = exchange(transport, padded, tag)
    return [_read(record, length) for record, length in zip(records, sizes, strict=True)]


def _read(record: torch.Tensor, length: int) -> bytes:
    return ctypes.string_at(record.data_ptr(), length)


def broadcast(transport: Transport, flat: torch.Tensor, source: int) -> None:
    """Collective. Afterwards `flat` holds worker `source`'s bits everywhere. One round, P bytes to each peer."""
    world = transport.world
    if world.rank == source:
        pending = [transport.send(flat, peer, CONTROL) for peer in world.peers]
    else:
        pending = [transport.receive(flat, source, CONTROL)]
    for transfer in pending:
        transfer.wait()
