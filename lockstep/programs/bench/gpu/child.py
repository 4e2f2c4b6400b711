"""What a process of a benchmark on a GPU runs: one side, which does what it is told and then waits for the next word.

    python -m lockstep.programs.bench.gpu.child PLAN SIDE FOLDER

It is alone, or one of several workers under `lockstep run`. It never speaks first but to say who it is.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import BadEnvironment
from lockstep.programs.bench.gpu import evidence
from lockstep.programs.bench.gpu.children import SOCKET
from lockstep.programs.bench.gpu.opening import EXACT, open_side
from lockstep.programs.bench.gpu.plan import Plan
from lockstep.programs.bench.gpu.sides import Side
from lockstep.programs.bench.gpu.talk import Talk
from lockstep.programs.bench.machine import describe_machine
from lockstep.programs.large_models import LARGE_WORKLOADS
from lockstep.programs.models import count_parameters
from lockstep.settings.environment import find_place, process_environment
from lockstep.world import World

WARM_STEPS = 12
"""Enough for everything that is learned or captured in the first steps."""

UNTIMED_STEPS = 3
"""At the beginning of a block. The memory that a block gave back at its end is taken again in the first of them."""

Words = dict[str, Any]


class Trainee:
    """One side and its answers to what it may be told; all members of a side are told the same."""

    def __init__(self, plan: Plan, name: str, folder: Path, world: World, stack: ExitStack) -> None:
        self._plan, self._name, self._folder, self._world = plan, name, folder, world
        self._stack = stack
        self._side: Side | None = None

    @property
    def side(self) -> Side:
        assert self._side is not None, "told to train before it was told to open"
        return self._side

    def do(self, word: str, **options: Any) -> Words:
        tasks: dict[str, Callable[..., Words]] = {
            "open": self.open,
            "prepare": self.prepare,
            "write": self.write,
            "compare": self.compare,
            "block": self.block,
        }
        answer = tasks[word](**options)
        self._give_back()
        return answer

    def open(self) -> Words:
        """The side is made: most of that is the CPU's work, so all children do it at once."""
        workload = LARGE_WORKLOADS[self._plan.model](**self._plan.sizes)
        self._side = open_side(self._name, workload, self._plan.device, self._world, self._folder, self._stack)
        return {"coarse": workload.rounds_coarsely}

    def prepare(self) -> Words:
        """The side is warm."""
        for number in range(WARM_STEPS):
            self.side.step(number)
        self._synchronize()
        if excuse := self.side.excuse():
            raise BadEnvironment(f"{self._name} cannot be measured here: {excuse}")
        return {
            "parameters": count_parameters(self.side.model),
            "machine": describe_machine(self._plan.device),
        }

    def write(self) -> Words:
        """The evidence that the others are held against is in the folder."""
        found = evidence.train_anew(self.side)
        if self._world.rank == 0:
            evidence.write(found, self._evidence_path)
        return {**evidence.compare(found, found), **self._digest(found)}

    def compare(self) -> Words:
        """How far this side is from the evidence in the folder; the first worker alone looks, and speaks for all."""
        found = evidence.train_anew(self.side)
        apart = evidence.compare(found, evidence.read(self._evidence_path)) if self._world.rank == 0 else {}
        return {**apart, **self._digest(found)}

    def block(self, steps: int) -> Words:
        """The seconds of `steps` steps, and the most memory that the process held in this block."""
        gc.collect()
        self._forget_peak()
        for number in range(UNTIMED_STEPS):
            self.side.step(number)
        self._synchronize()
        began_s = time.perf_counter()
        for number in range(steps):
            self.side.step(number)
        self._synchronize()
        return {"seconds": time.perf_counter() - began_s, **self._peak()}

    @property
    def _evidence_path(self) -> Path:
        return self._folder / "evidence.safetensors"

    def _digest(self, found: evidence.Evidence) -> Words:
        """Only where bits are compared."""
        compared = self._world.size > 1 or self._name in EXACT
        return {"digest": evidence.digest(found) if compared else None}

    # A plan on the CPU, for trying things out, has neither.

    def _synchronize(self) -> None:
        if self._plan.device != "cpu":
            torch.cuda.synchronize()

    def _forget_peak(self) -> None:
        if self._plan.device != "cpu":
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> Words:
        if self._plan.device == "cpu":
            return {"reserved_bytes": None, "allocated_bytes": None}
        return {
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "allocated_bytes": torch.cuda.max_memory_allocated(),
        }

    def _give_back(self) -> None:
        """While others have their turn, this process holds no more than its state and its graphs' memory."""
        if self._plan.device != "cpu":
            torch.cuda.empty_cache()


def main(plan: Plan, name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    world = find_place(process_environment()).world
    talk = Talk.to(folder / SOCKET)
    talk.say(side=name, rank=world.rank)
    with ExitStack() as stack:
        trainee = Trainee(plan, name, folder, world, stack)
        while (words := talk.hear()) is not None:
            talk.say(**trainee.do(**words))


if __name__ == "__main__":
    main(Plan.read(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    # Not by Python's own way: see the end of bench/worker.py.
    sys.stdout.flush()
    os._exit(0)
