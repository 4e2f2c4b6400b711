"""Small messages: fixed-size records that every worker sends to every other."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lockstep.wire.transport import CONTROL, Pending, Transport


@dataclass
class PendingExchange:
    """An exchange under way; the records are flat uint8 tensors of one size."""

    mine: torch.Tensor
    rank: int
    sends: list[Pending]
    receives: dict[int, Pending]
    theirs: dict[int, torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """Every worker's record, by rank."""
        for pending in [*self.receives.values(), *self.sends]:
            pending.wait()
        return [record for _, record in sorted([(self.rank, self.mine), *self.theirs.items()])]


def post(transport: Transport, record: torch.Tensor, tag: int = CONTROL) -> PendingExchange:
    """Starts to send `record` to all and to receive theirs; returns at once. One round, W-1 messages each way."""
    world = transport.world
    theirs = {peer: torch.empty_like(record) for peer in world.peers}
    receives = {peer: transport.receive(place, peer, tag) for peer, place in theirs.items()}
    sends = [transport.send(record, peer, tag) for peer in world.peers]
    return PendingExchange(record, world.rank, sends, receives, theirs)


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
