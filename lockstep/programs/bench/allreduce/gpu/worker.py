"""What every worker of an all-reduce benchmark on GPUs runs: for each size see that the sums are right, then time them.

    python -m lockstep.programs.bench.allreduce.gpu.worker PLAN FOLDER

Each worker prints its progress, of which the launcher shows worker 0's; worker 0 leaves the result in FOLDER.
"""

import gc
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from lockstep.errors import told_as_lost
from lockstep.programs.bench.allreduce.agreement import object_to
from lockstep.programs.bench.allreduce.gpu.plan import COPY_BYTES
from lockstep.programs.bench.allreduce.gpu.sides import Memory, floor_ms, open_sides
from lockstep.programs.bench.allreduce.gpu.timing import settle_repetitions, slowest, time_block
from lockstep.programs.bench.allreduce.plan import FLOOR, SIDES, Part, Plan, order
from lockstep.programs.bench.allreduce.result import Result, Times
from lockstep.programs.bench.allreduce.sides import Side, open_gloo, reduce_by
from lockstep.programs.bench.machine import describe_machine
from lockstep.programs.bench.result import Progress
from lockstep.programs.bench.spread import quantile
from lockstep.run.start import start
from lockstep.wire import Wire

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Place:
    """Where this worker computes, and with whom. Only the first worker has the memory to be measured."""

    device: torch.device
    wire: Wire
    group: ProcessGroupGloo
    memory: Memory | None = None

    def wait(self) -> None:
        """The device has done all that it was given. The wire waits first: it wakes if a peer is gone."""
        self.wire.reducer.synchronize()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main(plan: Plan, folder: Path, copy_bytes: int = COPY_BYTES) -> None:
    torch.set_num_threads(1)
    run = start(seed=0, timeout_s=TIMEOUT_S, device=plan.device)
    store = FileStore(str(folder / "store"), run.size)
    wire = run._wire  # the run's own, as a step uses it; nobody steps meanwhile
    with run, open_gloo(wire.world, store, TIMEOUT_S) as group:
        place = Place(run.device, wire, group)
        memory = Memory(copy_bytes, run.device, place.wait) if run.rank == 0 else None
        result = measure(plan, replace(place, memory=memory))
        if run.rank == 0:
            result.write(folder)


def measure(plan: Plan, place: Place) -> Result:
    """Collective. The times of all sizes, or the first objection to a sum."""
    reduce = reduce_by(plan.algorithm, place.wire)
    machine = describe_machine(plan.device)
    sizes: list[Times] = []
    for number, part in enumerate(plan.parts):
        opened = open_sides(part.num_bytes, place.wire, reduce, place.group, place.device)
        with told_as_lost(0, part.title), opened as sides:
            refused = object_to(part, sides, place.wire.transport)
            if refused is not None:
                return Result(refused, [], machine)
            told = Progress(number * plan.rounds, len(plan.parts) * plan.rounds)
            sizes.append(time_part(part, sides, place, told))
    return Result(None, sizes, machine)


def time_part(part: Part, sides: Mapping[str, Side], place: Place, told: Progress) -> Times:
    """Collective. The times of one size; `told` are the rounds before it. The 95th percentile is of blocks."""
    for side in sides.values():
        side.tensor.zero_()  # other sums would grow with every operation, until they are infinite
    gc.collect()
    counts = settle_repetitions(sides, place.wire.transport, place.wait)
    rounds: list[dict[str, float]] = []
    for number in range(part.rounds):
        rounds.append({name: _block_ms(name, part, sides, counts, place) for name in order(number)})
        print(Progress(told.done + number + 1, told.total).written(), flush=True)
    p95 = {name: quantile([blocks[name] for blocks in rounds], 0.95) for name in SIDES}
    return Times(part.num_bytes, rounds, p95, {**counts, FLOOR: 1})


def _block_ms(name: str, part: Part, sides: Mapping[str, Side], counts: Mapping[str, int], place: Place) -> float:
    """Collective. Milliseconds of one operation, or of the floor as the memory's speed of this moment gives it."""
    if name != FLOOR:
        return 1000 * time_block(sides[name], counts[name], place.wire.transport, place.wait)
    speed = 0.0 if place.memory is None else place.memory.bytes_per_s()
    return floor_ms(part.num_bytes, part.workers, slowest(speed, place.wire.transport))


if __name__ == "__main__":
    main(Plan.read(sys.argv[1]), Path(sys.argv[2]))
    # Not by Python's own way: see the end of bench/worker.py.
    sys.stdout.flush()
    os._exit(0)
