"""How fast the wire is: a short measurement at the start, agreed by all workers."""

import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lockstep.lanes import Assignment, reduction
from lockstep.wire.exchange import exchange
from lockstep.wire.reducer import Reducer
from lockstep.wire.transport import Transport

SMALL, LARGE = 64, 256 * 1024
"""Elements of the two messages that are timed: 256 bytes, and 1 MiB."""


@dataclass(frozen=True)
class Link:
    """The latency of a round, and the bandwidth of one worker while all workers send."""

    latency_s: float
    bytes_per_s: float

    def price_s(self, rounds: float, num_bytes: float) -> float:
        """How long a schedule takes in which the busiest worker sends `num_bytes`."""
        return rounds * self.latency_s + num_bytes / self.bytes_per_s


def measure(
    reducer: Reducer,
    transport: Transport,
    clock: Callable[[], float] = time.perf_counter,
    repeats: int = 3,
    device: torch.device | None = None,
) -> Link:
    """Collective. Times a few reductions by direct slices; the slowest worker counts, so all get the same link.

    A reduction of P bytes on W workers takes 2 rounds, in which each sends 2·(W-1)/W·P bytes. On a GPU its time ends
    when the GPU is done.
    """
    where = device or torch.device("cpu")
    small, large = (_time(reducer, transport, size, clock, repeats, where) for size in (SMALL, LARGE))
    size = transport.world.size
    sent = 2 * (size - 1) / size * LARGE * 4
    moving_s = large - small if large > small else large  # on a busy machine the small one may take longer
    mine = Link(max(small / 2, 1e-9), sent / max(moving_s, 1e-9))
    links = [_unpack(record) for record in exchange(transport, _pack(mine))]
    return Link(max(link.latency_s for link in links), min(link.bytes_per_s for link in links))


def _time(
    reducer: Reducer,
    transport: Transport,
    size: int,
    clock: Callable[[], float],
    repeats: int,
    device: torch.device,
) -> float:
    world = transport.world
    whole = reduction(Assignment.even(world.size, world.size), tuple(range(world.size)))
    value = reducer.allocate(size, torch.float32, device).zero_()
    taken = []
    for _ in range(repeats + 1):
        start = clock()
        reducer.reduce(whole, [value], value)
        if device.type == "cuda":
            reducer.synchronize()
        taken.append(clock() - start)
    reducer.release(value)
    return statistics.median(taken[1:])  # the first one connects and maps


def _pack(link: Link) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack("dd", link.latency_s, link.bytes_per_s)), dtype=torch.uint8)


def _unpack(record: torch.Tensor) -> Link:
    return Link(*struct.unpack("dd", bytes(record.tolist())))
