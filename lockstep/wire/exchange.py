"""Small messages: fixed-size records that every worker sends to every other.

# Note [Rounds of an exchange]
# Few workers send their records to each other directly: one round. Beyond MOST_DIRECT the W-1 messages of a worker cost
# more than the rounds that they save, so records travel as route.py says: up a tree to the first worker of each host,
# between these in rounds, and down the tree. A worker has every record only when every worker has sent its own, as in
# a direct exchange: who is lost on the way, the first worker of a host too, fails the exchange of all whose records or
# answers it would have passed on.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.wire.route import route_of
from lockstep.wire.transport import CONTROL, Pending, Transport

MOST_DIRECT = 16
"""See Note [Rounds of an exchange]."""


class PendingExchange(Protocol):
    """An exchange under way; the records are flat uint8 tensors of one size."""

    def wait(self) -> list[torch.Tensor]:
        """Every worker's record, by rank. It, or `wait_for_bytes`, is called once."""

    def wait_for_bytes(self) -> list[bytes]:
        """The same as bytes, which is faster for many."""


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

    def wait_for_bytes(self) -> list[bytes]:
        return [_read(record, record.numel()) for record in self.wait()]


class RoutedExchange:
    """What needs nothing from others is under way; the rest follows when it is waited for.

    Exchanges of one tag must be waited for in the order in which they were posted.
    """

    def __init__(self, transport: Transport, record: torch.Tensor, tag: int) -> None:
        self._transport, self._tag, self._bytes = transport, tag, record.numel()
        self._route = route = route_of(transport.hosts, transport.world.rank)
        self._records = record.new_empty(transport.world.size * self._bytes)
        """In the order of the route."""
        self._part(route.own.start, route.own.start + 1).copy_(record)
        self._gathered = [
            self._receive(child.rank, child.records.start, child.records.stop) for child in route.children
        ]
        self._begun = [] if route.children else self._begin()

    def wait(self) -> list[torch.Tensor]:
        self._finish()
        pieces = self._records.split(self._bytes)
        return [pieces[place] for place in self._route.places]

    def wait_for_bytes(self) -> list[bytes]:
        self._finish()
        whole, size = _read(self._records, self._records.numel()), self._bytes
        return [whole[place * size : (place + 1) * size] for place in self._route.places]

    def _finish(self) -> None:
        route = self._route
        for pending in self._gathered:
            pending.wait()
        for pending in self._begun or self._begin():
            pending.wait()
        for hop in route.hops[1:]:
            for pending in self._pass(*hop):
                pending.wait()
        if route.parent is not None:
            self._receive(route.parent, 0, len(route.places)).wait()
        for pending in [self._send(child.rank, 0, len(route.places)) for child in route.children]:
            pending.wait()

    def _begin(self) -> list[Pending]:
        """What follows when this worker has the records of all below it: up the tree, or on to other hosts."""
        route = self._route
        if route.parent is not None:
            return [self._send(route.parent, route.own.start, route.own.stop)]
        return self._pass(*route.hops[0]) if route.hops else []

    def _pass(self, target: int, num_sent: int, source: int, first: int, stop: int) -> list[Pending]:
        return [self._receive(source, first, stop), self._send(target, 0, num_sent)]

    def _part(self, first: int, stop: int) -> torch.Tensor:
        return self._records[first * self._bytes : stop * self._bytes]

    def _send(self, target: int, first: int, stop: int) -> Pending:
        return self._transport.send(self._part(first, stop), target, self._tag)

    def _receive(self, source: int, first: int, stop: int) -> Pending:
        return self._transport.receive(self._part(first, stop), source, self._tag)


def post(transport: Transport, record: torch.Tensor, tag: int = CONTROL) -> PendingExchange:
    """Starts to send `record` to all and to receive theirs; returns at once. See Note [Rounds of an exchange]."""
    world = transport.world
    if world.size > MOST_DIRECT:
        return RoutedExchange(transport, record, tag)
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
    record = torch.frombuffer(bytearray(make_record()), dtype=torch.uint8)
    records = post(transport, record, tag).wait_for_bytes()
    return {peer: records[peer] for peer in peers}


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
