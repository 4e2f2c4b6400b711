"""Times the sides in short blocks that take turns. A block's time is that of its slowest worker."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.programs.bench.allreduce.plan import SIDES, order
from lockstep.programs.bench.allreduce.sides import Side
from lockstep.wire import exchange
from lockstep.wire.transport import Transport

BLOCK_S = 0.05
LEAST, MOST = 3, 2000
"""How many operations a block has: enough for BLOCK_S, within these bounds."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Block:
    """The mean time of an operation in ms, and every operation's own."""

    mean_ms: float
    each_ms: list[float]


def settle_repetitions(sides: Mapping[str, Side], transport: Transport) -> dict[str, int]:
    """Collective. How many operations a block of each side has: the same on every worker."""
    tried = {name: time_block(sides[name], LEAST, transport) for name in SIDES}
    return {name: repetitions(statistics.median(block.each_ms) / 1000) for name, block in tried.items()}


def repetitions(operation_s: float) -> int:
    return min(MOST, max(LEAST, round(BLOCK_S / operation_s)))


def timed_rounds(
    sides: Mapping[str, Side], counts: Mapping[str, int], num_rounds: int, transport: Transport
) -> Iterator[dict[str, Block]]:
    """Collective. For each round the block of every side."""
    for number in range(num_rounds):
        yield {name: time_block(sides[name], counts[name], transport) for name in order(number)}


def time_block(side: Side, count: int, transport: Transport, clock: Clock = time.perf_counter) -> Block:
    """Collective. All workers start together; one operation goes ahead untimed, for caches."""
    exchange(transport, torch.zeros(1, dtype=torch.uint8))
    side.operate()
    stamps = [clock()]
    for _ in range(count):
        side.operate()
        stamps.append(clock())
    return slowest([_read(record) for record in exchange(transport, _written(stamps))])


def slowest(stamps_of: list[Tensor]) -> Block:
    """From every worker's own times in s, before its first operation and after each."""
    means = [float(stamps[-1] - stamps[0]) / (len(stamps) - 1) for stamps in stamps_of]
    each = torch.stack([stamps.diff() for stamps in stamps_of]).amax(dim=0)
    return Block(1000 * max(means), each.mul(1000).tolist())


def _written(stamps: list[float]) -> Tensor:
    return torch.tensor(stamps, dtype=torch.float64).view(torch.uint8)


def _read(record: Tensor) -> Tensor:
    return record.view(torch.float64)
