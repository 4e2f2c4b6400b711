"""A channel from one worker of a host to another: a ring of slots in shared memory.

# Note [A ring of slots]
# A slot carries one chunk of a message: a header, then bytes. `filled` counts the slots that the receiver may read,
# `free` those that the sender may write. Both are semaphores (Note [Semaphores as signals]), so a slot has one owner at
# any time. Chunks arrive in the order they were put; chunks that a worker put before it died or left can still be read.

# Note [Who rings]
# A worker waits for many channels at once, but can sleep on one semaphore only: its bell. A sender that fills a slot
# rings the receiver's. A receiver that frees one rings the sender's only if the chunk asks for it: a sender that waits
# for an answer would be woken for nothing. A chunk asks if more is waiting behind it, or if it took the last free slot.
# That is enough: if a sender finds no slot free, the last chunk that it put is still in the ring, and this chunk asks.
"""

import ctypes
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lockstep.wire.shared import semaphores
from lockstep.wire.shared.semaphores import SEMAPHORE_BYTES

NUM_SLOTS = 4
INBOUND_BYTES = 4 * 1024 * 1024
"""About how much memory a worker has for all that comes in, at any number of workers."""

MIN_SLOT_BYTES, MAX_SLOT_BYTES = 4 * 1024, 256 * 1024
QUICK_BYTES = 64 * 1024
"""Up to this size a copy keeps the interpreter lock: getting it back could take longer than the copy."""

_FILLED, _FREE, _LEFT, _SLOTS = (place * SEMAPHORE_BYTES for place in range(4))
_HEADER = struct.Struct("<qqq?")
_HEADER_BYTES = 64


class Chunk(NamedTuple):
    """What a slot holds: some bytes at `address`, of a message that has `message_bytes` in all."""

    tag: int
    message_bytes: int
    num_bytes: int
    asks: bool
    address: int


@dataclass(frozen=True)
class ChannelLayout:
    """The layout of a worker's inbound segment: its bell, then one channel for each peer, by rank."""

    num_peers: int

    @property
    def slot_bytes(self) -> int:
        fair = INBOUND_BYTES // max(1, self.num_peers) // NUM_SLOTS
        return min(max(fair, MIN_SLOT_BYTES), MAX_SLOT_BYTES) // 64 * 64

    @property
    def channel_bytes(self) -> int:
        return _SLOTS + NUM_SLOTS * (_HEADER_BYTES + self.slot_bytes)

    @property
    def segment_bytes(self) -> int:
        return SEMAPHORE_BYTES + self.num_peers * self.channel_bytes

    def channel_start(self, place: int) -> int:
        return SEMAPHORE_BYTES + place * self.channel_bytes

    def initialize(self, segment: torch.Tensor) -> None:
        """Makes the semaphores, and frees every slot. Called once, by the segment's owner, before others see it."""
        semaphores.initialize(segment.data_ptr())
        for place in range(self.num_peers):
            channel = segment.data_ptr() + self.channel_start(place)
            for which in (_FILLED, _FREE, _LEFT):
                semaphores.initialize(channel + which)
            for _ in range(NUM_SLOTS):
                semaphores.post(channel + _FREE)


class Channel:
    """One end of a channel. One thread at a time. `far_bell` is the address of the other end's bell."""

    def __init__(self, layout: ChannelLayout, segment: torch.Tensor, place: int, far_bell: int) -> None:
        start = segment.data_ptr() + layout.channel_start(place)
        stride = _HEADER_BYTES + layout.slot_bytes
        self._segment = segment  # the memory must outlive the addresses
        self._far_bell = far_bell
        self._filled, self._free, self._left = start + _FILLED, start + _FREE, start + _LEFT
        self._slots = [start + _SLOTS + slot * stride for slot in range(NUM_SLOTS)]
        self._headers = [(ctypes.c_char * _HEADER_BYTES).from_address(slot) for slot in self._slots]
        self._turn = 0

    def _advance(self) -> None:
        self._turn = (self._turn + 1) % NUM_SLOTS


class Outbound(Channel):
    """The sender's end."""

    _has_slot = False

    def ready(self) -> bool:
        """Whether a slot is free; it stays reserved for the next `put`."""
        self._has_slot = self._has_slot or semaphores.take(self._free)
        return self._has_slot

    def put(self, chunk: Chunk) -> None:
        """Passes the chunk to the receiver. May be called only when `ready`. See Note [Who rings]."""
        copy(self._slots[self._turn] + _HEADER_BYTES, chunk.address, chunk.num_bytes)
        self._has_slot = semaphores.take(self._free)
        asks = chunk.asks or not self._has_slot
        _HEADER.pack_into(self._headers[self._turn], 0, chunk.tag, chunk.message_bytes, chunk.num_bytes, asks)
        self._advance()
        semaphores.post(self._filled)
        semaphores.post(self._far_bell)

    def leave(self) -> None:
        """The sender will put no more chunks; those in the ring can still be read."""
        semaphores.post(self._left)


class Inbound(Channel):
    """The receiver's end."""

    def get(self) -> Chunk | None:
        """The next chunk, if one is there. `free` must be called for it before the next `get`."""
        if not semaphores.take(self._filled):
            return None
        tag, message_bytes, num_bytes, asks = _HEADER.unpack_from(self._headers[self._turn])
        return Chunk(tag, message_bytes, num_bytes, asks, self._slots[self._turn] + _HEADER_BYTES)

    def free(self, chunk: Chunk) -> None:
        """The sender may use the slot again."""
        self._advance()
        semaphores.post(self._free)
        if chunk.asks:
            semaphores.post(self._far_bell)

    def has_left(self) -> bool:
        """Whether the sender has left since the last call: all its chunks can be taken now."""
        return semaphores.take(self._left)


_quick_copy = ctypes.PyDLL(None).memmove
_long_copy = ctypes.CDLL(None).memmove  # lets other threads of this process run
for _copy in (_quick_copy, _long_copy):
    _copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _copy.restype = None


def copy(target: int, source: int, num_bytes: int) -> None:
    if num_bytes > QUICK_BYTES:
        _long_copy(target, source, num_bytes)
    elif num_bytes:
        _quick_copy(target, source, num_bytes)
