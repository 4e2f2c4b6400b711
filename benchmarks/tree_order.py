"""What the fixed order of additions costs: the same all-reduce in shared memory, by the lane tree and in rank order.

    lockstep run -n 4 benchmarks/tree_order.py

Both sides take turns in the same processes. The ratio is tree ÷ rank order: median of the rounds, and quartiles.
"""

import functools
import statistics

import torch

from lockstep.elastic.rendezvous import open_store
from lockstep.lanes import Branch, Reduction, Root
from lockstep.programs.bench.allreduce.worker import lockstep_side, repetitions, time_each
from lockstep.programs.bench.report import quantile
from lockstep.settings.environment import find_place, process_environment
from lockstep.wire import Wire, in_shared_memory
from lockstep.wire.schedules import one_root_each

MiB = 2**20
ROUNDS = 40


def in_rank_order(num_workers: int) -> Reduction:
    """(((0 + 1) + 2) + 3) ...: what a loop over workers would do."""
    roots = [Root(rank, 0) for rank in range(num_workers)]
    return Reduction(one_root_each(num_workers).folds, functools.reduce(Branch, roots))


def compare(wire: Wire, num_bytes: int) -> list[float]:
    """Collective. The ratio of every round."""
    reductions = {"tree": one_root_each(wire.world.size), "ranks": in_rank_order(wire.world.size)}
    sides = {
        name: lockstep_side(wire, lambda t, whole=whole: wire.reducer.reduce(whole, [t], t), num_bytes // 4)
        for name, whole in reductions.items()
    }
    for side in sides.values():
        side.tensor.zero_()
    count = repetitions(time_each(sides["tree"], wire.transport, 20).mean_ms / 1000)
    ratios = []
    for number in range(ROUNDS):
        order = list(sides) if number % 2 else list(sides)[::-1]
        times = {name: time_each(sides[name], wire.transport, count).mean_ms for name in order}
        ratios.append(times["tree"] / times["ranks"])
    for side in sides.values():
        wire.reducer.release(side.tensor)
    return ratios


def main() -> None:
    torch.set_num_threads(1)
    place = find_place(process_environment())
    with in_shared_memory(place.world, open_store(place, 60.0), 60.0) as wire:
        for num_bytes in (64 * 1024, MiB, 4 * MiB, 25 * MiB):
            ratios = compare(wire, num_bytes)
            if place.world.rank == 0:
                low, high = quantile(ratios, 0.25), quantile(ratios, 0.75)
                middle = statistics.median(ratios)
                print(f"{num_bytes / MiB:8.4g} MiB  {middle:.3f}  ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
