"""What every worker of a step benchmark runs: it makes the sides, checks that they agree, and times them.

    python -m lockstep.programs.bench.step.worker PLAN FOLDER

Worker 0 prints its progress and leaves the result in FOLDER. docs/bench.md says what must agree, and why.
"""

import gc
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from lockstep.programs.bench import sides as ways
from lockstep.programs.bench.divided_sides import fsdp_side, zero_side
from lockstep.programs.bench.machine import describe_machine, pss_bytes
from lockstep.programs.bench.plan import BenchResult
from lockstep.programs.bench.rounds import timed_rounds
from lockstep.programs.bench.sides import Evidence, LockstepSide, TrainingSide, distance, end_process, make_kit
from lockstep.programs.bench.step import plan as steps
from lockstep.programs.bench.step.plan import CpuStepPlan
from lockstep.programs.models import Workload, count_parameters, reference_workload
from lockstep.run.run import Run
from lockstep.run.start import start

GRADIENT_TOLERANCE = 1e-4
MOVEMENT_TOLERANCE = 5e-2


@dataclass(frozen=True)
class CpuSide:
    """A way to train in the worker's process. `threads` is None where the process is as lockstep.start left it.

    `alone`: only worker 0 computes, the others wait.
    """

    training: TrainingSide
    threads: int | None = 1
    alone: bool = False

    def conditions(self) -> AbstractContextManager[None]:
        """lockstep asks for deterministic kernels; the other sides run as torch comes, as their users have it."""
        return nullcontext() if self.threads is None else as_torch_comes(self.threads)


Sides = Mapping[str, CpuSide]


def main(plan: CpuStepPlan, folder: Path) -> None:
    with start(seed=0, device="cpu", strategy=plan.strategy) as run:
        store = process_group(folder / "store", run)
        workload = reference_workload(plan.model)
        base = pss_bytes(settled=True)
        memory, sides = measured_sides(side_makers(workload, run, len(os.sched_getaffinity(0))), run.rank == 0)
        on_host = gathered({"base": base, **memory}, run.size)
        differences, refused = agree(plan, sides, comparable(workload, run.size), run, store)
        timed = lambda name: time_block(sides[name], plan.steps, run.rank == 0)  # noqa: E731
        rounds = [] if refused else timed_rounds(plan.title, plan.rounds, steps.SIDES, timed)
        if run.rank == 0:
            as_rows = {name: asdict(difference) for name, difference in differences.items()}
            parameters = count_parameters(sides[steps.LOCKSTEP].training.model)
            rows = () if refused else (steps.make_row(plan, rounds, parameters, as_rows, on_host),)
            BenchResult(refused, rows, describe_machine()).leave(folder)


def process_group(path: Path, run: Run) -> Store:
    """Collective. Afterwards torch's default process group is Gloo's among the same workers, for DDP."""
    store = FileStore(str(path), run.size)
    dist.init_process_group("gloo", store=store, rank=run.rank, world_size=run.size)
    return store


# -- sides ------------------------------------------------------------------------------------------------------


def side_makers(workload: Workload, run: Run, all_threads: int) -> dict[str, Callable[[], CpuSide]]:
    """How each side is made, by name, with its own copy of the same model. Collective, but for those alone."""
    ddp = lambda backend: ways.ddp_side(make_kit(workload), run.rank, run.size, dist.new_group(backend=backend))  # noqa: E731
    return {
        steps.LOCKSTEP: lambda: CpuSide(LockstepSide(make_kit(workload), run), threads=None),
        steps.DDP: lambda: CpuSide(ddp("gloo")),
        steps.ZERO: lambda: CpuSide(zero_side(make_kit(workload), run.rank, run.size)),
        steps.FSDP: lambda: CpuSide(fsdp_side(make_kit(workload), run.rank, run.size)),
        steps.ON_BACKEND: lambda: CpuSide(ddp("lockstep")),
        steps.ONE_THREAD: lambda: CpuSide(ways.plain_side(make_kit(workload)), 1, alone=True),
        steps.ALL_THREADS: lambda: CpuSide(ways.plain_side(make_kit(workload)), all_threads, alone=True),
    }


@contextmanager
def as_torch_comes(threads: int) -> Iterator[None]:
    """Inside, torch may choose any kernel, as it does by default, and uses `threads` threads."""
    threads_before = torch.get_num_threads()
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


# -- memory -----------------------------------------------------------------------------------------------------


def measured_sides(
    makers: Mapping[str, Callable[[], CpuSide]], is_first: bool
) -> tuple[dict[str, int], dict[str, CpuSide]]:
    """Collective. All sides, and the memory that each takes in its first two steps, without the initial weights."""
    memory, sides = dict.fromkeys(makers, 0), {}
    for name, make in makers.items():
        before = pss_bytes(settled=True)
        side = sides[name] = make()
        if is_first or not side.alone:
            memory[name] = max(0, peak_pss_bytes(side) - before - side.training.initial_bytes)
        dist.barrier()
    return memory, sides


def peak_pss_bytes(side: CpuSide) -> int:
    """The highest of many looks while the side does its first two steps."""
    done, highest = threading.Event(), [pss_bytes()]

    def look() -> None:
        while not done.wait(0.002):
            highest[0] = max(highest[0], pss_bytes())

    watcher = threading.Thread(target=look, name="lockstep-bench-memory")
    watcher.start()
    try:
        with side.conditions():
            for number in range(2):
                side.training.step(number)
    finally:
        done.set()
        watcher.join()
    return max(highest[0], pss_bytes())


def gathered(memory: Mapping[str, int], num_workers: int) -> dict[str, list[int]]:
    """Collective. The numbers of every worker, by rank."""
    mine = torch.tensor(list(memory.values()))
    everyone = [torch.zeros_like(mine) for _ in range(num_workers)]
    dist.all_gather(everyone, mine)
    return {name: [int(numbers[place]) for numbers in everyone] for place, name in enumerate(memory)}


# -- agreement --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepDifference:
    """How far a side is from lockstep, relative to lockstep's own size; infinite if something is missing."""

    gradients: float
    guilty: str
    movement: float


def take_evidence(side: CpuSide) -> Evidence:
    """The gradients of the first step, and the movement in a few. Collective, unless the side is `alone`."""
    training = side.training
    training.restart()
    with side.conditions():
        training.compute(0)
        gradients = training.gradients()
        training.update()
        for number in range(1, ways.NUM_STEPS):
            training.step(number)
    return Evidence(gradients, training.movement())


def comparable(workload: Workload, num_workers: int) -> tuple[str, ...]:
    """The sides that must agree with lockstep: where shares are normalised by themselves, only those that cut them."""
    in_shares = (steps.DDP, steps.ZERO, steps.FSDP, steps.ON_BACKEND)
    whole = () if workload.per_share_statistics and num_workers > 1 else (steps.ONE_THREAD, steps.ALL_THREADS)
    return (*in_shares, *whole)


def compare(side: Evidence, reference: Evidence) -> StepDifference:
    """The largest difference of any one gradient, with its name, and that of the movement as a whole."""
    odd = sorted(side.gradients.keys() ^ reference.gradients.keys())
    if odd:
        return StepDifference(math.inf, odd[0], math.inf)
    each = {
        name: distance({name: side.gradients[name]}, {name: expected}, of_zeros=0.0)[0]
        for name, expected in reference.gradients.items()
    }
    guilty = max(each, key=each.__getitem__)
    return StepDifference(each[guilty], guilty, distance(side.movement, reference.movement, of_zeros=0.0)[0])


def refusal(side: str, difference: StepDifference, model: str, rank: int) -> str | None:
    """The sentence that stops the benchmark, or None if the side agrees with lockstep to rounding."""
    where = f"{model}: {side} and lockstep disagree on worker {rank}"
    if not difference.gradients <= GRADIENT_TOLERANCE:
        return (
            f"{where}: the gradient of {difference.guilty} in the first step differs by "
            f"{difference.gradients:.1e} of its size, more than {GRADIENT_TOLERANCE:.0e}. Nothing was timed"
        )
    if not difference.movement <= MOVEMENT_TOLERANCE:
        return (
            f"{where}: after {ways.NUM_STEPS} steps the parameters are apart by {difference.movement:.1e} "
            f"of the way they went, more than {MOVEMENT_TOLERANCE:.0e}. Nothing was timed"
        )
    return None


def agree(
    plan: CpuStepPlan, sides: Sides, names: tuple[str, ...], run: Run, store: Store
) -> tuple[dict[str, StepDifference], str | None]:
    """Collective. How far each side is from lockstep on this worker, and the first objection of any worker."""
    reference = take_evidence(sides[steps.LOCKSTEP])
    here = [name for name in names if run.rank == 0 or not sides[name].alone]
    differences = {name: compare(take_evidence(sides[name]), reference) for name in here}
    objections = (refusal(name, differences[name], plan.model, run.rank) for name in here)
    mine = next((objection for objection in objections if objection), "")
    store.set(f"objection/{run.rank}", f"{mine}.")  # a store takes no empty value, so each is marked
    texts = [store.get(f"objection/{rank}").decode()[:-1] for rank in range(run.size)]
    return differences, next((text for text in texts if text), None)


# -- timing -----------------------------------------------------------------------------------------------------


def time_block(side: CpuSide, num_steps: int, is_first: bool) -> float:
    """Collective. The median time of a step in ms, after an untimed one; 0 on a worker that only waited.

    The garbage of others is collected before; then Python's collector runs as always.
    """
    side.training.restart()
    gc.collect()
    dist.barrier()
    times_s = []
    if is_first or not side.alone:
        with side.conditions():
            side.training.step(0)
            for number in range(1, num_steps + 1):
                began_s = time.perf_counter()
                side.training.step(number)
                times_s.append(time.perf_counter() - began_s)
    dist.barrier()
    return 1000 * statistics.median(times_s or [0.0])


if __name__ == "__main__":
    main(CpuStepPlan.read(sys.argv[1]), Path(sys.argv[2]))
    end_process()
