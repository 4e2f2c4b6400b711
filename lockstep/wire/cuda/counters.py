"""Counters by which streams of several processes wait for each other, while no host waits.

# Note [Waiting on the GPU]
# Each worker has two counters in the host's shared memory, which every GPU sees: how often it has arrived with its
# roots, and how often it has done its slice. A stream writes its own counter then, and waits until those of all peers
# have reached the same number; hosts put these operations into their streams and go on. Streams that wait take nothing
# from others on the same GPU. As the counters are in host memory, a host can see how far every worker's GPU is. When a
# worker has died its counters never change again, and every stream that waits for them would wait for ever: the host
# that notices writes a number that no round will reach, and all go on, with sums that are not used. A flag beside the
# counters records this: streams that still run may write their counters once more. For the same reason the host that
# releases them does so again and again, until the wire is closed.
"""

import ctypes
from collections.abc import Sequence

import torch

from lockstep.wire.cuda import driver
from lockstep.wire.cuda.driver import StreamBatch
from lockstep.wire.shared.memory import HostMemory

SPACING_BYTES = 128
PAGE_BYTES = 64 * 1024
FREE = 1 << 30
"""Added to a counter so that no stream waits for it any more; comparisons wrap around at twice that."""

ARRIVED, DONE = 0, 1


class StreamCounters:
    """The counters of all workers of one host, by rank. Its owner calls `close`."""

    def __init__(self, page: torch.Tensor, members: Sequence[int], rank: int, device: torch.device) -> None:
        self._page, self._members, self._rank, self._device = page, list(members), rank, device
        self._round = 0
        self._numbers = page.view(torch.int32)
        with driver.on(device):
            start = driver.register(page.data_ptr(), page.nbytes)
        self._batches = [self._batch(start, which) for which in (ARRIVED, DONE)]
        self._closed = False

    def begin(self) -> None:
        """Begins the next round, which `await_arrivals` and `await_done` then refer to."""
        self._round += 1

    def await_arrivals(self, stream: int) -> None:
        """What follows in the stream runs when all workers' streams have arrived at this round."""
        self._put(ARRIVED, stream)

    def await_done(self, stream: int) -> None:
        """What follows in the stream runs when all workers' streams have done this round."""
        self._put(DONE, stream)

    def behind(self) -> list[int]:
        """The peers for which this worker's stream waits: those that have not arrived, or else have not done the round.

        A worker that has not done it may itself wait for one that has not arrived.
        """
        for which in (ARRIVED, DONE):
            late = [rank for rank in self._members if rank != self._rank and self._ahead(rank, which) < 0]
            if late:
                return late
        return []

    def release(self) -> None:
        """Ends the waits of all streams, in this and in other processes. See Note [Waiting on the GPU]."""
        self._numbers[self._flag] = 1
        for rank in self._members:
            for which in (ARRIVED, DONE):
                self._numbers[self._place(rank, which)] = ctypes.c_int32(self._round + FREE).value

    @property
    def released(self) -> bool:
        """Whether this or another worker has released all streams: sums since then are invalid."""
        return bool(self._numbers[self._flag])

    def close(self) -> None:
        """May be called only when no stream of this process waits."""
        if not self._closed:
            self._closed = True
            driver.unregister(self._page.data_ptr())

    def _put(self, which: int, stream: int) -> None:
        self._batches[which].put(stream, self._round & 0xFFFFFFFF)

    def _ahead(self, rank: int, which: int) -> int:
        """How far a counter is ahead of this round, as numbers that wrap around."""
        number = int(self._numbers[self._place(rank, which)])
        return ctypes.c_int32(number - self._round).value

    def _batch(self, start: int, which: int) -> StreamBatch:
        peers = [rank for rank in self._members if rank != self._rank]
        waits = [start + 4 * self._place(peer, which) for peer in peers]
        return StreamBatch(start + 4 * self._place(self._rank, which), waits)

    @property
    def _flag(self) -> int:
        return 2 * len(self._members) * SPACING_BYTES // 4

    def _place(self, rank: int, which: int) -> int:
        """Where in the page, in numbers of four bytes."""
        return (2 * self._members.index(rank) + which) * SPACING_BYTES // 4


def open_counters(memory: HostMemory, device: torch.device) -> StreamCounters:
    """Collective. New counters: made by the lowest rank, known to all when this returns."""
    neighbours = memory.neighbours
    first = neighbours.members[0]
    num_bytes = max(PAGE_BYTES, SPACING_BYTES * (2 * len(neighbours.members) + 1))
    if neighbours.rank == first:
        page = memory.allocate(num_bytes)
        memory.reveal([page])
    else:
        page = memory.next_of(first)
    return StreamCounters(page, neighbours.members, neighbours.rank, device)
