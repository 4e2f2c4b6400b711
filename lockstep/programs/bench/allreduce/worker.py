"""What every worker of an all-reduce benchmark runs: for each size it checks the sums, then times them.

    python -m lockstep.programs.bench.allreduce.worker PLAN FOLDER

Worker 0 leaves the result in FOLDER. docs/bench.md says what the floor is.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from lockstep.elastic.rendezvous import open_store
from lockstep.errors import naming_lost_worker
from lockstep.programs.bench.allreduce import plan as allreduces
from lockstep.programs.bench.allreduce.plan import FLOOR, GLOO, LOCKSTEP, SHARED, AllreducePlan, title_of
from lockstep.programs.bench.allreduce.sizes import ELEMENT_BYTES
from lockstep.programs.bench.machine import describe_machine
from lockstep.programs.bench.plan import CPU, BenchResult
from lockstep.programs.bench.report import quantile
from lockstep.programs.bench.rounds import timed_rounds
from lockstep.programs.bench.sides import end_process
from lockstep.programs.explain.schedules.catalogue import Setting, find
from lockstep.run.start import start
from lockstep.settings.environment import find_place, process_environment
from lockstep.wire import Wire, exchange, in_shared_memory, over_gloo
from lockstep.wire.schedules import one_root_each
from lockstep.wire.schedules.executor import Executor
from lockstep.wire.transport import Transport
from lockstep.world import World

TIMEOUT_S = 120.0
BLOCK_S = 0.05
LEAST, MOST = 3, 2000  # how many operations a block has: enough for BLOCK_S, within these bounds
COPY_BYTES, COPIES = 2**30, 4  # what is copied to measure the speed of a GPU's memory: far more than any cache holds
ON_CPU = torch.device(CPU)

Reduce = Callable[[Tensor], None]
"""Collective. Afterwards the tensor holds the sum of all workers' tensors."""

Clock = Callable[[], float]
Wait = Callable[[], None]  # waits until the device has finished all its work


def main(plan: AllreducePlan, folder: Path) -> None:
    torch.set_num_threads(1)
    place = find_place(process_environment())
    store = open_store(place, TIMEOUT_S)
    open_wire = in_shared_memory if plan.algorithm == SHARED else over_gloo
    with open_wire(place.world, store, TIMEOUT_S) as wire, open_gloo(place.world, store, TIMEOUT_S) as group:
        result = measure(plan, AllreduceSite(wire, group))
    if place.world.rank == 0:
        result.leave(folder)


def main_on_gpu(plan: AllreducePlan, folder: Path, copy_bytes: int = COPY_BYTES) -> None:
    torch.set_num_threads(1)
    run = start(seed=0, timeout_s=TIMEOUT_S, device=plan.device)
    store = FileStore(str(folder / "store"), run.size)
    wire = run.guard.generation.wire  # the run's own, as a step uses it; no step runs meanwhile
    with run, open_gloo(wire.world, store, TIMEOUT_S) as group:
        result = measure(plan, GpuSite(wire, group, run.device, copy_bytes))
        if run.rank == 0:
            result.leave(folder)


# -- sides ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllreduceSide:
    """One way to all-reduce, for one size. `operate` leaves the sum in `tensor`. Collective, except for a copy."""

    tensor: Tensor
    operate: Callable[[], object]


Sides = Mapping[str, AllreduceSide]  # by name


def lockstep_side(wire: Wire, reduce: Reduce, num_elements: int, device: torch.device = ON_CPU) -> AllreduceSide:
    """In place, in memory of the wire, one lane for each worker: as a bucket of gradients is added."""
    tensor = wire.reducer.allocate(num_elements, torch.float32, device)
    return AllreduceSide(tensor, partial(reduce, tensor))


def gloo_side(group: Any, num_elements: int, device: torch.device) -> AllreduceSide:
    """torch's own process group, called directly: without the Python layers of torch.distributed."""
    tensors = [torch.empty(num_elements, device=device)]
    return AllreduceSide(tensors[0], lambda: group.allreduce(tensors).wait())


def copy_side(num_elements: int, device: torch.device) -> AllreduceSide:
    """The floor. Written, not only allocated: memory that was never written to may be one page, read over and over."""
    tensor, source = (torch.ones(num_elements, device=device) for _ in range(2))
    return AllreduceSide(tensor, partial(tensor.copy_, source))


def reduce_by(algorithm: str, wire: Wire) -> Reduce:
    """lockstep's reduction by the algorithm of this name: one tensor from every worker, each a lane of its own."""
    num_workers = wire.world.size
    if algorithm == SHARED:
        whole = one_root_each(num_workers)
        return lambda tensor: wire.reducer.reduce(whole, [tensor], tensor)
    executor = Executor(wire.transport)
    schedule = find("all_reduce", algorithm).schedule(Setting(num_workers))
    return lambda tensor: executor.run(schedule, tensor)


@contextmanager
def open_gloo(world: World, store: Store, timeout_s: float) -> Iterator[ProcessGroupGloo]:
    """Collective. A process group for Gloo's side alone, on loopback, its fastest way between processes of a host."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = ProcessGroupGloo(PrefixStore("bench/gloo", store), world.rank, world.size, options)
    try:
        yield group
    finally:
        group.abort()


# -- timing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OperationTimes:
    """The mean time of an operation in a block, in ms, and every one that was timed by itself."""

    mean_ms: float
    each_ms: list[float]


TimeBlock = Callable[[int], OperationTimes]
"""Collective. Times a block of so many operations."""


class AllreduceSite:
    """The memory in which this worker adds, and its peers: here the CPU's memory."""

    def __init__(self, wire: Wire, group: Any, device: torch.device = ON_CPU) -> None:
        self.wire, self.group, self.device = wire, group, device

    @contextmanager
    def open_sides(self, num_bytes: int, reduce: Reduce) -> Iterator[dict[str, AllreduceSide]]:
        """The sides by name, each with memory of its own, which is freed afterwards."""
        num_elements = num_bytes // ELEMENT_BYTES
        ours = lockstep_side(self.wire, reduce, num_elements, self.device)
        try:
            yield {LOCKSTEP: ours, GLOO: gloo_side(self.group, num_elements, self.device)}
        finally:
            self.wire.reducer.release(ours.tensor)

    def blocks(self, num_bytes: int, sides: Sides) -> dict[str, TimeBlock]:
        """What is timed, by name: the sides, and the floor."""
        every = {**sides, FLOOR: copy_side(num_bytes // ELEMENT_BYTES, self.device)}
        return {name: partial(time_each, side, self.wire.transport) for name, side in every.items()}

    def settle(self, blocks: Mapping[str, TimeBlock]) -> dict[str, int]:
        """Collective. How many operations a block of each side has: the same on every worker."""
        return {name: repetitions(statistics.median(block(LEAST).each_ms) / 1000) for name, block in blocks.items()}


class GpuSite(AllreduceSite):
    """In the memory of GPUs, which execute operations after the call that starts them has returned."""

    def __init__(self, wire: Wire, group: Any, device: torch.device, copy_bytes: int = COPY_BYTES) -> None:
        super().__init__(wire, group, device)
        self._copied = copy_side(copy_bytes // ELEMENT_BYTES, device) if wire.world.rank == 0 else None

    def wait(self) -> None:
        """Waits until the device has finished all its work. The wire waits first: it raises if a peer is lost."""
        self.wire.reducer.synchronize()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def blocks(self, num_bytes: int, sides: Sides) -> dict[str, TimeBlock]:
        """The floor is computed from the memory's speed at this moment."""
        transport = self.wire.transport

        def floor(_: int) -> OperationTimes:
            speed = 0.0 if self._copied is None else bytes_per_s(self._copied, self.wait)
            ms = floor_ms(num_bytes, transport.world.size, largest(speed, transport))
            return OperationTimes(ms, [ms])

        timed = {name: partial(time_together, side, transport, self.wait) for name, side in sides.items()}
        return {**timed, FLOOR: floor}

    def settle(self, blocks: Mapping[str, TimeBlock]) -> dict[str, int]:
        return {**super().settle({name: block for name, block in blocks.items() if name != FLOOR}), FLOOR: 1}


def repetitions(operation_s: float) -> int:
    return min(MOST, max(LEAST, round(BLOCK_S / operation_s)))


def time_each(side: AllreduceSide, transport: Transport, count: int) -> OperationTimes:
    """Collective. All workers start together; one operation goes ahead untimed, for caches."""
    exchange(transport, torch.zeros(1, dtype=torch.uint8))
    side.operate()
    stamps = [time.perf_counter()]
    for _ in range(count):
        side.operate()
        stamps.append(time.perf_counter())
    mine = torch.tensor(stamps, dtype=torch.float64).view(torch.uint8)
    return slowest([record.view(torch.float64) for record in exchange(transport, mine)])


def slowest(stamps_of: Sequence[Tensor]) -> OperationTimes:
    """From every worker's own times in s, before its first operation and after each."""
    means = [float(stamps[-1] - stamps[0]) / (len(stamps) - 1) for stamps in stamps_of]
    each = torch.stack([stamps.diff() for stamps in stamps_of]).amax(dim=0)
    return OperationTimes(1000 * max(means), each.mul(1000).tolist())


def time_together(
    side: AllreduceSide, transport: Transport, wait: Wait, count: int, clock: Clock = time.perf_counter
) -> OperationTimes:
    """Collective. The time of one operation among `count` back to back, on the worker that took longest.

    One operation goes ahead untimed. All workers start together, when their devices have nothing to do.
    """
    side.operate()
    wait()
    exchange(transport, torch.zeros(1, dtype=torch.uint8))
    began_s = clock()
    for _ in range(count):
        side.operate()
    wait()
    mean_ms = 1000 * largest((clock() - began_s) / count, transport)
    return OperationTimes(mean_ms, [mean_ms])


def largest(mine: float, transport: Transport) -> float:
    """Collective. The largest number of any worker."""
    record = torch.tensor([mine], dtype=torch.float64).view(torch.uint8)
    return max(float(theirs.view(torch.float64)) for theirs in exchange(transport, record))


def bytes_per_s(copy: AllreduceSide, wait: Wait) -> float:
    """Bytes read and bytes written, together."""
    copy.operate()
    wait()
    began_s = time.perf_counter()
    for _ in range(COPIES):
        copy.operate()
    wait()
    return 2 * COPIES * copy.tensor.nbytes / (time.perf_counter() - began_s)


def floor_ms(num_bytes: int, num_workers: int, bytes_per_s: float) -> float:
    return 1000 * 2 * num_workers * num_bytes / bytes_per_s


def measure(plan: AllreducePlan, site: AllreduceSite) -> BenchResult:
    """Collective. The times of all sizes, or the first objection to a sum."""
    reduce, machine = reduce_by(plan.algorithm, site.wire), describe_machine(plan.device)
    rows: list[dict[str, Any]] = []
    for num_bytes in plan.sizes:
        title = title_of(num_bytes, plan.workers)
        with naming_lost_worker(0, title), site.open_sides(num_bytes, reduce) as sides:
            if refused := object_to(title, sides, site.wire.transport):
                return BenchResult(refused, (), machine)
            rows.append(time_size(plan, num_bytes, sides, site))
    return BenchResult(None, tuple(rows), machine)


def time_size(plan: AllreducePlan, num_bytes: int, sides: Sides, site: AllreduceSite) -> dict[str, Any]:
    """Collective. The row of one size."""
    for side in sides.values():
        side.tensor.zero_()  # other sums would grow with every operation, until they are infinite
    gc.collect()
    blocks = site.blocks(num_bytes, sides)
    counts, names = site.settle(blocks), allreduces.SIDES
    timed = lambda name: blocks[name](counts[name])  # noqa: E731
    rounds = timed_rounds(title_of(num_bytes, plan.workers), plan.rounds, names, timed)
    means = [{name: block.mean_ms for name, block in times.items()} for times in rounds]
    p95 = {name: quantile([ms for times in rounds for ms in times[name].each_ms], 0.95) for name in names}
    return allreduces.make_row(plan.workers, num_bytes, means, p95, counts)


# -- agreement --------------------------------------------------------------------------------------------------

COMPARED, RIGHT = (LOCKSTEP, GLOO), -1
_PERIOD = 251  # a prime: a slice that lands in another's place shows


def object_to(title: str, sides: Sides, transport: Transport) -> str | None:
    """Collective. The sentence that stops the benchmark, the same on every worker, or None if all sums are right."""
    world = transport.world
    firsts = torch.tensor([first_wrong(sides[name], world.rank, world.size) for name in COMPARED])
    everyone = exchange(transport, firsts.view(torch.uint8))
    return refusal(title, [record.view(torch.int64).tolist() for record in everyone])


def first_wrong(side: AllreduceSide, rank: int, num_workers: int) -> int:
    """Collective. Where the sum of one all-reduce is wrong for the first time, or RIGHT.

    The numbers are 0 to 250 over and over: whole and small, so that float32 adds them without rounding, and in any
    order every sum has the same bits.
    """
    count, device = side.tensor.numel(), side.tensor.device
    base = torch.arange(_PERIOD, dtype=torch.float32, device=device).repeat(count // _PERIOD + 1)[:count]
    torch.mul(base, rank + 1, out=side.tensor)
    side.operate()
    expected = base.mul_(num_workers * (num_workers + 1) // 2)
    if torch.equal(side.tensor, expected):
        return RIGHT
    return int((side.tensor != expected).nonzero()[0])


def refusal(title: str, firsts: Sequence[Sequence[int]]) -> str | None:
    """Names the first side, worker and element that is wrong; `firsts` is by worker, then by compared side."""
    for number, name in enumerate(COMPARED):
        for rank, of_worker in enumerate(firsts):
            if of_worker[number] != RIGHT:
                return (
                    f"{title}: the sum by {name} is wrong on worker {rank}, "
                    f"first at element {of_worker[number]}. Nothing of this size was timed"
                )
    return None


if __name__ == "__main__":
    its_plan = AllreducePlan.read(sys.argv[1])
    if its_plan.device == CPU:
        main(its_plan, Path(sys.argv[2]))
    else:
        main_on_gpu(its_plan, Path(sys.argv[2]))
        end_process()
