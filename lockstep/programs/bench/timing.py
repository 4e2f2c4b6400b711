"""Times the sides in short blocks that take turns."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

from lockstep.programs.bench.plan import Plan, order
from lockstep.programs.bench.sides import Side

Barrier = Callable[[], None]
"""Collective. Waits without computing until every worker is there."""


def timed_rounds(plan: Plan, sides: Mapping[str, Side], is_first: bool, barrier: Barrier) -> Iterator[dict[str, float]]:
    """Collective. For each round the milliseconds per step of every side, as the first worker saw them."""
    for number in range(plan.rounds):
        yield {name: time_block(sides[name], plan.steps, is_first, barrier) for name in order(number)}


def time_block(side: Side, steps: int, is_first: bool, barrier: Barrier) -> float:
    """Collective. The median time of a step in ms; 0 on a worker that only waited.

    One step goes ahead untimed, for caches and threads. The garbage of others is collected before; then
    Python's collector runs as always, so that each side pays for its own.
    """
    side.restart()
    gc.collect()
    barrier()
    median_s = 0.0
    if is_first or not side.alone:
        with side.conditions():
            side.step(0)
            median_s = statistics.median(_time_step(side, number) for number in range(1, steps + 1))
    barrier()
    return 1000 * median_s


def _time_step(side: Side, number: int) -> float:
    began_s = time.perf_counter()
    side.step(number)
    return time.perf_counter() - began_s
