"""What every worker of an all-reduce benchmark runs: for each size make the sides, see that they agree, time them.

    python -m lockstep.programs.bench.allreduce.worker PLAN FOLDER

Each worker prints its progress, of which the launcher shows worker 0's; worker 0 leaves the result in FOLDER.
"""

import gc
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed import ProcessGroupGloo

from lockstep.elastic.rendezvous import open_store
from lockstep.errors import told_as_lost
from lockstep.programs.bench.allreduce.agreement import object_to
from lockstep.programs.bench.allreduce.algorithms import SHARED
from lockstep.programs.bench.allreduce.plan import SIDES, Part, Plan
from lockstep.programs.bench.allreduce.result import Result, Times
from lockstep.programs.bench.allreduce.sides import Side, open_gloo, open_sides, reduce_by
from lockstep.programs.bench.allreduce.timing import settle_repetitions, timed_rounds
from lockstep.programs.bench.machine import describe_machine
from lockstep.programs.bench.result import Progress
from lockstep.programs.bench.spread import quantile
from lockstep.settings.environment import find_place, process_environment
from lockstep.wire import Wire, in_shared_memory, over_gloo
from lockstep.wire.transport import Transport

TIMEOUT_S = 120.0


def main(plan: Plan, folder: Path) -> None:
    torch.set_num_threads(1)
    place = find_place(process_environment())
    store = open_store(place, TIMEOUT_S)
    opening = in_shared_memory if plan.algorithm == SHARED else over_gloo
    with opening(place.world, store, TIMEOUT_S) as wire, open_gloo(place.world, store, TIMEOUT_S) as group:
        result = measure(plan, wire, group)
    if place.world.rank == 0:
        result.write(folder)


def measure(plan: Plan, wire: Wire, group: ProcessGroupGloo) -> Result:
    """Collective. The times of all sizes, or the first objection to a sum."""
    reduce = reduce_by(plan.algorithm, wire)
    sizes: list[Times] = []
    for number, part in enumerate(plan.parts):
        with told_as_lost(0, part.title), open_sides(part.num_bytes, wire, reduce, group) as sides:
            refused = object_to(part, sides, wire.transport)
            if refused is not None:
                return Result(refused, [], describe_machine())
            told = Progress(number * plan.rounds, len(plan.parts) * plan.rounds)
            sizes.append(time_part(part, sides, wire.transport, told))
    return Result(None, sizes, describe_machine())


def time_part(part: Part, sides: Mapping[str, Side], transport: Transport, told: Progress) -> Times:
    """Collective. The times of one size; `told` are the rounds before it."""
    for side in sides.values():
        side.tensor.zero_()  # other sums would grow with every operation, until they are infinite
    gc.collect()
    counts = settle_repetitions(sides, transport)
    rounds = []
    for number, blocks in enumerate(timed_rounds(sides, counts, part.rounds, transport), start=1):
        rounds.append(blocks)
        print(Progress(told.done + number, told.total).written(), flush=True)
    return Times(
        part.num_bytes,
        rounds=[{name: block.mean_ms for name, block in blocks.items()} for blocks in rounds],
        p95={name: quantile([ms for blocks in rounds for ms in blocks[name].each_ms], 0.95) for name in SIDES},
        repetitions=counts,
    )


if __name__ == "__main__":
    main(Plan.read(sys.argv[1]), Path(sys.argv[2]))
