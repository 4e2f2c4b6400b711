"""The traces of a run's workers as values, and where runs of one script first differ. Without torch."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TracedState:
    """Digests of everything that is trained, by name, in the model's own order; and of all of it together.

    States are equal if these are. `rates` are the learning rates at that moment, `batch` the number of the next batch
    in its pass, if there is one and it has a number.
    """

    digest: str
    tensors: Mapping[str, str]
    buffers: frozenset[str] = frozenset()
    rates: Mapping[str, float] = field(default_factory=dict, compare=False)
    batch: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Lane:
    """The data, the generators and the gradients of a lane in one step: digests, and the norm of each gradient."""

    worker: int
    data: str
    threads: int = 1
    chance: Mapping[str, str] = field(default_factory=dict)
    gradients: Mapping[str, tuple[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerTrace:
    """One worker's states, by the number of updates applied, and the last one that it wrote."""

    states: Mapping[int, TracedState]
    last: TracedState

    @property
    def first_step(self) -> int:
        return min(self.states)

    @property
    def num_steps(self) -> int:
        return max(self.states) - self.first_step


@dataclass(frozen=True)
class RunTrace:
    """One run: its workers, its lanes by (step, lane), and torch's warnings of nondeterministic operators.

    `norms` has the size of each parameter's gradient, over all lanes, by step; `compiled` what torch.compile was given;
    `kept` the notes on what lanes keep for the next lane, and data sets for the next sample.
    """

    label: str
    workers: tuple[WorkerTrace, ...]
    lanes: Mapping[tuple[int, int], Lane] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    norms: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    compiled: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return self.workers[0].last.digest

    @property
    def num_steps(self) -> int:
        return self.workers[0].num_steps

    @property
    def last_step(self) -> int:
        """The most updates that any worker has applied."""
        return max((step for worker in self.workers for step in worker.states), default=0)

    def lanes_of(self, step: int) -> dict[int, Lane]:
        return {lane: record for (at, lane), record in self.lanes.items() if at == step}


def trace_path(folder: Path, rank: int, pid: int | None = None) -> Path:
    """The trace file of worker `rank`; with a `pid`, of that process, which has replaced it."""
    return folder / (f"worker-{rank}.jsonl" if pid is None else f"worker-{rank}-{pid}.jsonl")


def trace_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("worker-*.jsonl"))


def read_run(label: str, paths: list[Path]) -> RunTrace:
    """The run whose workers wrote to `paths`, in the order of their ranks."""
    entries = [_entries(path) for path in paths]
    return _run(label, entries, [_worker(worker) for worker in entries])


def read_disturbed(label: str, folders: Iterable[Path]) -> RunTrace:
    """A run in which workers were lost or replaced, or which went on in a second folder.

    Its workers are those that finished. The states of one that was killed, or that left because its script was not
    where the others' were, do not count; but its lanes are evidence.
    """
    entries = [_entries(path) for folder in folders for path in trace_paths(folder)]
    good = [worker for worker in entries if worker and worker[-1]["kind"] == "end" and not worker[-1]["failed"]]
    traces = [_worker(worker) for worker in good]
    return _run(label, entries, [trace for trace in traces if trace.num_steps > 0])


Entry = dict[str, Any]


def _entries(path: Path) -> list[Entry]:
    """The entries of a worker's trace; the last line of one that was killed may be cut off."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def _run(label: str, entries: list[list[Entry]], workers: list[WorkerTrace]) -> RunTrace:
    """Of a lane that was computed several times, the last generation's counts."""
    everything = sorted((entry for worker in entries for entry in worker), key=lambda e: int(e.get("generation", 0)))
    return RunTrace(
        label=label,
        workers=tuple(workers),
        lanes={(e["step"], e["lane"]): _lane(e) for e in everything if e["kind"] == "lane"},
        warnings=tuple(dict.fromkeys(e["text"] for e in everything if e["kind"] == "nondeterministic")),
        norms={e["step"]: e["norms"] for e in everything if e["kind"] == "step"},
        compiled=tuple(dict.fromkeys(e["text"] for e in everything if e["kind"] == "compiled")),
        kept=tuple(dict.fromkeys(e["text"] for e in everything if e["kind"] == "kept")),
    )


def _worker(entries: list[Entry]) -> WorkerTrace:
    states = [(entry["step"], _state(entry)) for entry in entries if entry["kind"] == "state"]
    return WorkerTrace(states=dict(states), last=states[-1][1])


def _state(entry: Entry) -> TracedState:
    return TracedState(
        entry["digest"], entry["tensors"], frozenset(entry["buffers"]), entry.get("rates", {}), entry.get("batch")
    )


def _lane(entry: Entry) -> Lane:
    gradients = {name: (digest, norm) for name, (digest, norm) in entry["gradients"].items()}
    return Lane(entry["rank"], entry["data"], entry["threads"], entry["chance"], gradients)


# -- where runs first differ -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TracedWorker:
    run: RunTrace
    worker: int

    def state(self, step: int) -> TracedState | None:
        """Its state after `step` updates; None if it made fewer."""
        return self.run.workers[self.worker].states.get(step)

    def __str__(self) -> str:
        return self.run.label if self.worker == 0 else f"worker {self.worker} of {self.run.label}"


@dataclass(frozen=True)
class TraceDifference:
    """The first difference: it shows after `step` updates (0: before the first), first in `tensors[0]`.

    No tensors mean that one side had ended before.
    """

    step: int
    left: TracedWorker
    right: TracedWorker
    tensors: tuple[str, ...]

    @property
    def between_replicas(self) -> bool:
        """Whether the two sides are workers of the same run."""
        return self.left.run is self.right.run


def first_difference(runs: Sequence[RunTrace]) -> TraceDifference | None:
    """The earliest difference between the workers of a run, or between a run and the first one.

    At the same step the workers of one run come before different runs: they show more about the cause.
    """
    steps = sorted({step for run in runs for worker in run.workers for step in worker.states})
    replicas = ((TracedWorker(run, 0), TracedWorker(run, rank)) for run in runs for rank in range(1, len(run.workers)))
    pairs = [*replicas, *((TracedWorker(runs[0], 0), TracedWorker(run, 0)) for run in runs[1:])]
    differences = (difference for step in steps for pair in pairs if (difference := _compare(step, *pair)))
    return next(differences, None)


def is_equal(run: RunTrace, first: RunTrace) -> bool:
    """Whether all workers of `run` had the same bits as `first` after every step."""
    return first_difference([first, run]) is None


def difference_after(calm: RunTrace, disturbed: RunTrace) -> TraceDifference | None:
    """The earliest difference between a calm run and a disturbed one.

    Its workers need not have been there all the time: each is compared with the calm run for the steps that it made,
    and one of them must have reached the same end.
    """
    steps = sorted({step for worker in disturbed.workers for step in worker.states})
    pairs = [(TracedWorker(calm, 0), TracedWorker(disturbed, number)) for number in range(len(disturbed.workers))]
    there = ((step, pair) for step in steps for pair in pairs if pair[1].state(step) is not None)
    differences = (difference for step, pair in there if (difference := _compare(step, *pair)))
    end = max(calm.workers[0].states)
    has_end = any(end in worker.states for worker in disturbed.workers)
    missing = None if has_end else TraceDifference(end, TracedWorker(calm, 0), TracedWorker(disturbed, 0), ())
    return next(differences, None) or missing


def _compare(step: int, left: TracedWorker, right: TracedWorker) -> TraceDifference | None:
    ours, theirs = left.state(step), right.state(step)
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        return TraceDifference(step, left, right, ())
    if ours.digest == theirs.digest:
        return None
    names = dict.fromkeys([*ours.tensors, *theirs.tensors])
    differing = tuple(name for name in names if ours.tensors.get(name) != theirs.tensors.get(name))
    return TraceDifference(step, left, right, differing)
