"""Times operations that a GPU carries out after the call that starts them has returned."""

import time
from collections.abc import Callable, Mapping

import torch

from lockstep.programs.bench.allreduce.gpu.sides import Wait
from lockstep.programs.bench.allreduce.sides import Side
from lockstep.programs.bench.allreduce.timing import LEAST, repetitions
from lockstep.wire import exchange
from lockstep.wire.transport import Transport

Clock = Callable[[], float]


def settle_repetitions(sides: Mapping[str, Side], transport: Transport, wait: Wait) -> dict[str, int]:
    """Collective. How many operations a block of each side has: the same on every worker."""
    return {name: repetitions(time_block(side, LEAST, transport, wait)) for name, side in sides.items()}


def time_block(side: Side, count: int, transport: Transport, wait: Wait, clock: Clock = time.perf_counter) -> float:
    """Collective. The seconds of one operation among `count` back to back, on the worker that took longest.

    One operation goes ahead untimed. All workers start together, when their devices have nothing to do.
    """
    side.operate()
    wait()
    exchange(transport, torch.zeros(1, dtype=torch.uint8))
    began_s = clock()
    for _ in range(count):
        side.operate()
    wait()
    return slowest((clock() - began_s) / count, transport)


def slowest(mine: float, transport: Transport) -> float:
    """Collective. The largest number of any worker."""
    record = torch.tensor([mine], dtype=torch.float64).view(torch.uint8)
    return max(float(theirs.view(torch.float64)) for theirs in exchange(transport, record))
