"""Meetings of the workers of one host: each shows some of its memory, all work on it, and a barrier closes the meeting.

# Note [Two barriers]
# `meet` writes a worker's row of the board, posts its peers' `here` semaphore, and takes one post from each of them:
# then all rows can be read, and all memory that they name may be read and written as the workers agreed.
# `closing_barrier` does the same with the `done` semaphore: then no worker uses a peer's memory any more. Two
# semaphores for each worker are enough: a worker posts `here` of the next meeting only after it has taken `done` of
# this one from every peer. The row also has how often its worker has posted, to name those that are late.
"""

import ctypes
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.errors import SILENT, BadArgument
from lockstep.wire.shared import semaphores
from lockstep.wire.shared.memory import HostMemory
from lockstep.wire.shared.neighbours import ENDED
from lockstep.wire.shared.semaphores import SEMAPHORE_BYTES

ROW_BYTES = 64 * 1024
_HERE, _DONE, _POSTED, _LENGTH, _TEXT = 0, SEMAPHORE_BYTES, 2 * SEMAPHORE_BYTES, 2 * SEMAPHORE_BYTES + 8, 256
_HEAD, _REFERENCE = struct.Struct("<II"), struct.Struct("<Iq")
MAX_TENSORS = (ROW_BYTES - _TEXT - 4096) // _REFERENCE.size
"""How many tensors a worker can show in a meeting, and 4 KiB of words."""


@dataclass(eq=False)
class Meeting:
    """What every worker shows, by rank: a few words, and memory as flat bytes.

    As long as every worker shows the same, `meet` returns the same object: `prepared` is the caller's cache for it.
    """

    words: dict[int, bytes]
    memory: dict[int, list[torch.Tensor]]
    prepared: Any = field(default=None)


class Board:
    """One stream of meetings between the workers of one host. One thread at a time."""

    def __init__(self, memory: HostMemory, board: torch.Tensor) -> None:
        self.memory = memory
        self._neighbours = memory.neighbours
        self.members = self._neighbours.members
        self._peers = sorted(self._neighbours.sockets)
        self._tensor = board
        self._bytes = memoryview((ctypes.c_char * board.nbytes).from_address(board.data_ptr())).cast("B")
        starts = {rank: place * ROW_BYTES for place, rank in enumerate(self.members)}
        self._starts = starts
        self._own_start = starts[self._neighbours.rank]
        self._addresses = {rank: board.data_ptr() + start for rank, start in starts.items()}
        self._posts = 0
        self._is_waiting = False
        self._spins = semaphores.SPINS if len(self.members) <= semaphores.cores else 0
        self._texts: dict[tuple[Any, ...], bytes] = {}
        self._meetings: dict[tuple[bytes, ...], Meeting] = {}
        self._num_forgotten = 0

    def meet(self, words: bytes, tensors: Sequence[torch.Tensor] = (), *, spin: bool = False) -> Meeting:
        """Collective. Shows `words` and `tensors` to every worker; each tensor must begin a segment of `memory`.

        With `spin` the worker stays awake for a moment, if there are cores for all: for small messages.
        """
        text = self._text(words, tensors)
        start = self._own_start
        self._bytes[start + _LENGTH : start + _LENGTH + 8] = len(text).to_bytes(8, "little")
        self._bytes[start + _TEXT : start + _TEXT + len(text)] = text
        self._signal(_HERE, spin)
        return self._read()

    def closing_barrier(self, *, spin: bool = False) -> None:
        """Collective. Afterwards no worker uses a peer's memory any more."""
        self._signal(_DONE, spin)

    def awaited(self) -> list[int]:
        """The workers whose posts this one waits for now. Any thread."""
        return self._late() if self._is_waiting else []

    def _signal(self, which: int, spin: bool) -> None:
        """Posts to every peer, and takes a post of each."""
        for peer in self._peers:
            semaphores.post(self._addresses[peer] + which)
        self._posts += 1  # after the posts: a worker that dies between them has not posted
        posted = self._own_start + _POSTED
        self._bytes[posted : posted + 8] = self._posts.to_bytes(8, "little")
        self._is_waiting = True
        try:
            self._take_posts(self._addresses[self._neighbours.rank] + which, self._spins if spin else 0)
        finally:
            self._is_waiting = False

    def _take_posts(self, own: int, spins: int) -> None:
        for _ in self._peers:
            if not semaphores.wait(own, spins):
                self._wait_long(own)

    def _wait_long(self, address: int) -> None:
        """Waits on while the workers that have not posted yet are alive."""
        waited_s, before = 0.0, time.monotonic()
        while True:
            # Looks are counted, not seconds: a job that was suspended as a whole has not waited.
            now = time.monotonic()
            waited_s, before = waited_s + min(now - before, 2 * semaphores.LOOK_S), now
            self.memory.read_mail()
            gone = self._neighbours.gone()  # before reading what they posted: a dead worker posts nothing more
            late = self._late()
            for peer in late:
                if peer in gone:
                    raise self._neighbours.blame(peer, ENDED)
            if self._neighbours.closed:
                raise self._neighbours.blame(self._peers[0], "")
            if waited_s > self._neighbours.timeout_s:
                silent = (late or self._peers)[0]
                raise self._neighbours.blame(silent, f"{SILENT} {self._neighbours.timeout_s:g} s")
            if semaphores.wait(address):
                return

    def _late(self) -> list[int]:
        """The workers whose rows have fewer posts than this worker's."""
        return [peer for peer in self._peers if self._posted(peer) < self._posts]

    def _posted(self, peer: int) -> int:
        place = self._starts[peer] + _POSTED
        return int.from_bytes(self._bytes[place : place + 8], "little")

    # -- the rows --------------------------------------------------------------------------------------------

    def _text(self, words: bytes, tensors: Sequence[torch.Tensor]) -> bytes:
        key = (words, *((self.memory.number_of(tensor), tensor.nbytes) for tensor in tensors))
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) > 1000:
                self._texts.clear()
            text = self._texts[key] = self._compose(words, tensors)
        return text

    def _compose(self, words: bytes, tensors: Sequence[torch.Tensor]) -> bytes:
        numbers = self.memory.reveal(tensors)
        places = b"".join(
            _REFERENCE.pack(number, tensor.nbytes) for number, tensor in zip(numbers, tensors, strict=True)
        )
        text = _HEAD.pack(len(numbers), len(words)) + places + words
        if len(text) > ROW_BYTES - _TEXT:
            raise BadArgument(f"{len(tensors)} tensors are too many for one meeting: at most {MAX_TENSORS}")
        return text

    def _read(self) -> Meeting:
        rows = tuple(self._row(rank) for rank in self.members)
        if self._num_forgotten != self.memory.num_forgotten or len(self._meetings) > 1000:
            self._meetings.clear()
            self._num_forgotten = self.memory.num_forgotten
        meeting = self._meetings.get(rows)
        if meeting is None:
            meeting = self._meetings[rows] = self._parse(rows)
        return meeting

    def _row(self, rank: int) -> bytes:
        start = self._starts[rank]
        length = int.from_bytes(self._bytes[start + _LENGTH : start + _LENGTH + 8], "little")
        return bytes(self._bytes[start + _TEXT : start + _TEXT + length])

    def _parse(self, rows: tuple[bytes, ...]) -> Meeting:
        words, shown = {}, {}
        for rank, row in zip(self.members, rows, strict=True):
            num_tensors, num_words = _HEAD.unpack_from(row)
            end = _HEAD.size + num_tensors * _REFERENCE.size
            words[rank] = row[end : end + num_words]
            shown[rank] = [self._look(rank, *pair) for pair in _REFERENCE.iter_unpack(row[_HEAD.size : end])]
        return Meeting(words, shown)

    def _look(self, rank: int, number: int, num_bytes: int) -> torch.Tensor:
        return self.memory.view(rank, number)[:num_bytes]


def open_board(memory: HostMemory) -> Board:
    """Collective. A new board, made by the lowest rank; all have mapped it when this returns."""
    neighbours = memory.neighbours
    first = neighbours.members[0]
    if neighbours.rank == first:
        board = memory.allocate(ROW_BYTES * len(neighbours.members))
        for place in range(len(neighbours.members)):
            for which in (_HERE, _DONE):
                semaphores.initialize(board.data_ptr() + place * ROW_BYTES + which)
        memory.reveal([board])
        return Board(memory, board)
    return Board(memory, memory.next_of(first))
