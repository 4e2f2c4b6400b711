"""The history of a run: how training went (`history.jsonl`), and what the workers did (`workers.jsonl`).

Note [Histories]
The present first worker writes the history: a line with the step, its loss, samples and seconds since the line before,
and a line when workers came or went, or a checkpoint was saved. The launcher writes what it sees of all workers, with
the times of Note [Where the time goes] in channels/status.py. Lines are a fifth of a second (history) or a second
(workers) apart at first. Later they are as far apart as a thousandth of the time so far, at most a minute, so that a
run of a week has some fifteen thousand lines. A run that was resumed writes on; where its steps begin again below those
that are there, the later line is the valid one.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.events import CheckpointSaved, Closed, Event, GenerationFormed, StepCommitted
from lockstep.launch.channels.status import Phase, StatusRow
from lockstep.launch.events import WorkersSeen
from lockstep.observe.json_lines import LineFile

STEPS_FILE = "history.jsonl"
WORKERS_FILE = "workers.jsonl"
READ = (StepCommitted, GenerationFormed, CheckpointSaved, Closed)
"""The kinds of events that belong to the history."""

_MOST_S = 60.0


@dataclass
class LineRhythm:
    """When the next line is due. See Note [Histories]."""

    least_s: float
    began_s: float | None = None
    last_s: float = -math.inf

    def is_due(self, now_s: float) -> bool:
        """Whether a line is written now; it then counts as the last one."""
        self.began_s = now_s if self.began_s is None else self.began_s
        apart_s = min(max(self.least_s, (now_s - self.began_s) / 1000), _MOST_S)
        is_due = now_s - self.last_s >= apart_s
        self.last_s = now_s if is_due else self.last_s
        return is_due


class StepHistory:
    """A reader of a worker's events. All workers count; the one that `speaks` now writes.

    `say` is called once if the history cannot be written; `lanes` gives the number of lanes of every worker, by slot.
    """

    def __init__(
        self,
        folder: Path,
        speaks: Callable[[], bool],
        lanes: Callable[[], dict[int, int]],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._file = LineFile(folder / STEPS_FILE, "the history of the run", say)
        self._speaks, self._lanes, self._clock = speaks, lanes, clock
        self._steps = CountedSteps(LineRhythm(0.2))

    def __call__(self, event: Event) -> None:
        match event:
            case StepCommitted():
                entry = self._steps.take(event)
            case Closed():
                entry = self._steps.rest()
            case _:
                entry = _change_of(event)
        if entry is not None and self._speaks():
            self._file.append({"at": self._clock(), **entry, "lanes": self._lanes()})


@dataclass
class CountedSteps:
    """The steps since the last line."""

    rhythm: LineRhythm
    num_steps: int = 0
    num_samples: int = 0
    since_s: float | None = None
    last: StepCommitted | None = None

    def take(self, event: StepCommitted) -> dict[str, Any] | None:
        """The entry of all steps since the last one, if it is due."""
        self.num_steps += 1
        self.num_samples += event.num_samples
        self.last = event
        return self._entry() if self.rhythm.is_due(event.time_s) else None

    def rest(self) -> dict[str, Any] | None:
        """The entry of the steps that no line has yet."""
        return self._entry() if self.num_steps else None

    def _entry(self) -> dict[str, Any]:
        assert self.last is not None
        loss, now_s = self.last.loss, self.last.time_s
        entry = {
            "step": self.last.step,
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "steps": self.num_steps,
            "samples": self.num_samples,
            "seconds": None if self.since_s is None else now_s - self.since_s,
        }
        self.num_steps = self.num_samples = 0
        self.since_s = now_s
        return entry


def _change_of(event: Event) -> dict[str, Any] | None:
    match event:
        case GenerationFormed():
            who = {"slots": event.slots, "lost": event.lost, "left": event.left, "joined": event.joined}
            return {"kind": "GenerationFormed", "step": event.step, **who, "took_s": event.took_s}
        case CheckpointSaved():
            return {"kind": "CheckpointSaved", "step": event.step, "path": event.path, "took_s": event.took_s}
    return None


class WorkerHistory:
    """A reader of the launcher's events: writes what it sees of the workers."""

    def __init__(self, folder: Path, say: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._file, self._clock = LineFile(folder / WORKERS_FILE, "the history of the workers", say), clock
        self._rhythm = LineRhythm(0.9)

    def __call__(self, event: Event) -> None:
        if not isinstance(event, WorkersSeen) or not self._rhythm.is_due(event.time_s):
            return
        workers = {slot: _row_of(row) for slot, row in event.rows.items() if row.has_started}
        if workers:
            self._file.append({"at": self._clock(), "step": event.step, "workers": workers})


def _row_of(row: StatusRow) -> dict[str, Any]:
    return {
        "phase": Phase(row.phase).name.lower() if row.phase in list(Phase) else "",
        "member": row.is_member,
        "step": row.step,
        "lanes": row.num_lanes if row.is_member else 0,
        "committed_s": row.committed_ns / 1e9,
        "compute_s": row.compute_ns / 1e9,
        "waiting_s": row.waiting_ns / 1e9,
        "data_s": row.data_ns / 1e9,
        "memory": row.memory_bytes,
        "gpu_memory": row.gpu_bytes,
    }
