"""Which samples each lane was given, told by every worker as it happens, so that the dead have told it too.

A worker appends a line for each lane that begins, with the generation it is in, and one for each step that counts. A
step that counts, counts as it was computed in one generation: its lanes there are the samples that were used. Workers
that died right after a commit may have counted the step in an earlier one, if nobody who heard of the commit is left.
"""

import json
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.events import Event, GenerationFormed, LaneBegan, StepBegan, StepCommitted, StepWithdrawn
from lockstep.run.run import Run

Used = dict[int, dict[int, list[int]]]
"""By step and lane: the samples."""


class Writer:
    """One worker's hand in the ledger. The last part of a lane's data must be the samples' indices."""

    def __init__(self, path: Path, slot: int, run: Run) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._slot, self._run = slot, run
        self._attempt = 0
        self._training = False
        run._events.subscribe(self)

    def __call__(self, event: Event) -> None:
        match event:
            case StepBegan():
                self._training = True
                self._attempt = self._run.guard.generation.wire.world.generation
            case GenerationFormed(generation=generation, committed=False):
                self._attempt = generation
            case LaneBegan(lane, data=data, step=step) if self._training:
                self._attempt = self._run.guard.generation.wire.world.generation
                self._write("lane", step, lane, data[-1].tolist())
            case StepWithdrawn(step=step):
                self._write("withdrawn", step)
            case StepCommitted(step=step):
                self._training = False
                self._write("counts", step)

    def _write(self, *words: Any) -> None:
        line = json.dumps([words[0], self._slot, os.getpid(), self._attempt, *words[1:]]) + "\n"
        os.write(self._file, line.encode())  # one call: lines of several workers do not mix


@dataclass(frozen=True)
class Ledger:
    """All that was told in one run."""

    lines: list[list[Any]]

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        return cls([json.loads(line) for line in path.read_text().splitlines()])

    def used(self) -> Used:
        """What the steps that count were computed from; fails where workers differ or two gave one lane."""
        generations = self._generations()
        carriers: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
        for kind, slot, _, generation, step, *rest in self.lines:
            if kind == "lane" and generations.get(step) == generation:
                lane, samples = rest
                carriers[step, lane][slot] = samples
            elif kind == "withdrawn":
                for (its_step, _), by_slot in carriers.items():
                    if its_step == step:
                        by_slot.pop(slot, None)
        used: Used = defaultdict(dict)
        for (step, lane), by_slot in sorted((key, by_slot) for key, by_slot in carriers.items() if by_slot):
            assert len(by_slot) == 1, f"lane {lane} of step {step} was used by workers {sorted(by_slot)}"
            used[step][lane] = next(iter(by_slot.values()))
        return dict(used)

    def _generations(self) -> dict[int, int]:
        """In which generation each step that counts was computed."""
        found: dict[int, dict[int, int]] = defaultdict(dict)
        last: dict[int, int] = {}
        for kind, _, pid, generation, step, *_ in self.lines:
            last[pid] = generation
            if kind == "counts":
                found[step][pid] = generation
        newest = {step: max(by_pid.values()) for step, by_pid in found.items()}
        for step, by_pid in found.items():
            both = [pid for pid, generation in by_pid.items() if generation < newest[step] <= last[pid]]
            assert not both, f"step {step} counts twice for processes {both}: in generation {newest[step]}, and before"
        return newest
