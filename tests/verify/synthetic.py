"""Runs that never ran: traces made by hand, equal unless a test says otherwise."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.verify.evidence import Lane, RunTrace, TracedState, WorkerTrace

NUM_STEPS = 3
NUM_LANES = 4
PARAMETERS = ("weight", "bias")
BUFFERS = ("mean",)
OPTIMIZER = ("optimizer/weight/step",)


def make_run(num_workers: int, num_steps: int = NUM_STEPS) -> RunTrace:
    """A run of a model with two parameters, a buffer and some optimizer state; lanes are dealt evenly."""
    worker = WorkerTrace({step: state(step) for step in range(num_steps + 1)}, state(num_steps))
    lanes = {
        (step, lane): Lane(
            worker=lane * num_workers // NUM_LANES,
            data=f"data {step} {lane}",
            chance={"torch": f"torch {step} {lane}", "NumPy": f"numpy {step} {lane}"},
            gradients={name: (f"{name} {step} {lane}", 1.0) for name in PARAMETERS},
        )
        for step in range(num_steps)
        for lane in range(NUM_LANES)
    }
    label = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    return RunTrace(label, (worker,) * num_workers, lanes)


def state(step: int, changed: Sequence[str] = ()) -> TracedState:
    names = (*PARAMETERS, *BUFFERS, *OPTIMIZER)
    tensors = {name: f"{name} {step}{' changed' * (name in changed)}" for name in names}
    return TracedState(str(tensors), tensors, frozenset(BUFFERS))


def with_state(run: RunTrace, step: int, *changed: str, worker: int | None = None) -> RunTrace:
    """The same run, but from `step` on some tensors are others: on all workers or on one."""
    workers = [
        _changed(trace, step, changed) if worker in (None, rank) else trace for rank, trace in enumerate(run.workers)
    ]
    return replace(run, workers=tuple(workers))


def with_lane(run: RunTrace, step: int, lane: int, **changes: Any) -> RunTrace:
    """The same run, but one lane of one step was another."""
    return replace(run, lanes={**run.lanes, (step, lane): replace(run.lanes[step, lane], **changes)})


def _changed(trace: WorkerTrace, since: int, names: Sequence[str]) -> WorkerTrace:
    states = {step: state(step, names) if step >= since else kept for step, kept in trace.states.items()}
    return WorkerTrace(states, states[max(states)])
