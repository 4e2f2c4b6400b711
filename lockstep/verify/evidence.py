"""What the workers of one run wrote down, read back as values. Without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class State:
    """Digests of everything that is trained, by name, in the model's own order; and of all of it together."""

    digest: str
    tensors: Mapping[str, str]
    buffers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Lane:
    """What a lane of one step was given and what it left: digests, and the norm of each gradient."""

    worker: int
    data: str
    threads: int = 1
    chance: Mapping[str, str] = field(default_factory=dict)
    gradients: Mapping[str, tuple[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerTrace:
    """One worker's states, by the number of updates applied, and the last one that it wrote."""

    states: Mapping[int, State]
    last: State

    @property
    def first_step(self) -> int:
        return min(self.states)

    @property
    def num_steps(self) -> int:
        return max(self.states) - self.first_step


@dataclass(frozen=True)
class RunTrace:
    """One run: its workers, its lanes by (step, lane), and torch's warnings of nondeterministic operators."""

    label: str
    workers: tuple[WorkerTrace, ...]
    lanes: Mapping[tuple[int, int], Lane] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return self.workers[0].last.digest

    @property
    def num_steps(self) -> int:
        return self.workers[0].num_steps

    def lanes_of(self, step: int) -> dict[int, Lane]:
        return {lane: record for (at, lane), record in self.lanes.items() if at == step}


def trace_path(folder: Path, rank: int) -> Path:
    """Where worker `rank` writes down what it computes."""
    return folder / f"worker-{rank}.jsonl"


def read_run(label: str, paths: list[Path]) -> RunTrace:
    """The run whose workers wrote to `paths`, in the order of their ranks."""
    entries = [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in paths]
    everything = [entry for worker in entries for entry in worker]
    return RunTrace(
        label=label,
        workers=tuple(_worker(worker) for worker in entries),
        lanes={(e["step"], e["lane"]): _lane(e) for e in everything if e["kind"] == "lane"},
        warnings=tuple(dict.fromkeys(e["text"] for e in everything if e["kind"] == "nondeterministic")),
    )


def _worker(entries: list[dict[str, Any]]) -> WorkerTrace:
    states = [(entry["step"], _state(entry)) for entry in entries if entry["kind"] == "state"]
    return WorkerTrace(states=dict(states), last=states[-1][1])


def _state(entry: dict[str, Any]) -> State:
    return State(entry["digest"], entry["tensors"], frozenset(entry["buffers"]))


def _lane(entry: dict[str, Any]) -> Lane:
    gradients = {name: (digest, norm) for name, (digest, norm) in entry["gradients"].items()}
    return Lane(entry["rank"], entry["data"], entry["threads"], entry["chance"], gradients)
