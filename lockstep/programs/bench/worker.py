"""What every worker of a step benchmark runs: make the sides, see that they agree, time them.

    python -m lockstep.programs.bench.worker PLAN FOLDER

Worker 0 prints its progress and leaves the result in FOLDER.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from lockstep.programs.bench.agreement import Difference, comparable, compare, refusal, take_evidence
from lockstep.programs.bench.machine import describe_machine
from lockstep.programs.bench.plan import LOCKSTEP, Plan
from lockstep.programs.bench.result import Progress, Result
from lockstep.programs.bench.sides import Side, make_sides
from lockstep.programs.bench.timing import timed_rounds
from lockstep.programs.models import count_parameters, reference_workload
from lockstep.run.run import Run
from lockstep.run.start import start


def main(plan: Plan, folder: Path) -> None:
    with start(seed=0, device="cpu") as run:
        store = process_group(folder / "store", run)
        all_threads = len(os.sched_getaffinity(0))
        workload = reference_workload(plan.model)
        sides = make_sides(workload, run, all_threads)
        names = comparable(workload, run.size)
        differences, refused = agree(plan, sides, names, run, store)
        rounds = [] if refused else _timed(plan, sides, run)
        if run.rank == 0:
            Result(
                refused=refused,
                differences={name: asdict(difference) for name, difference in differences.items()},
                rounds=rounds,
                parameters=count_parameters(sides[LOCKSTEP].model),
                machine=describe_machine(),
            ).write(folder)


def process_group(path: Path, run: Run) -> Store:
    """Collective. Afterwards torch's default process group is Gloo's among the same workers, for DDP."""
    store = FileStore(str(path), run.size)
    dist.init_process_group("gloo", store=store, rank=run.rank, world_size=run.size)
    return store


def agree(
    plan: Plan, sides: Mapping[str, Side], names: tuple[str, ...], run: Run, store: Store
) -> tuple[dict[str, Difference], str | None]:
    """Collective. How far each side is from lockstep here, and the first objection of any worker."""
    reference = take_evidence(sides[LOCKSTEP])
    differences: dict[str, Difference] = {}
    objections = []
    for name in names:
        if run.rank == 0 or not sides[name].alone:
            differences[name] = compare(take_evidence(sides[name]), reference)
            objections.append(refusal(name, differences[name], plan.model, run.rank))
    mine = next((objection for objection in objections if objection), "")
    return differences, next((text for text in _exchanged(mine, run, store) if text), None)


def _exchanged(text: str, run: Run, store: Store) -> list[str]:
    """Collective. Every worker's text, by rank. A store takes no empty value, so each is marked."""
    store.set(f"objection/{run.rank}", f"{text}.")
    return [store.get(f"objection/{rank}").decode()[:-1] for rank in range(run.size)]


def _timed(plan: Plan, sides: Mapping[str, Side], run: Run) -> list[dict[str, float]]:
    rounds: list[dict[str, float]] = []
    run.print(Progress(0, plan.rounds).written(), flush=True)
    for times in timed_rounds(plan, sides, run.rank == 0, dist.barrier):
        rounds.append(times)
        run.print(Progress(len(rounds), plan.rounds).written(), flush=True)
    return rounds


if __name__ == "__main__":
    main(Plan.read(sys.argv[1]), Path(sys.argv[2]))
    # Not by Python's own way: taking DDP's process group apart, torch's threads and Python's shutdown can wait for each
    # other for ever.
    sys.stdout.flush()
    os._exit(0)
