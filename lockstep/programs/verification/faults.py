"""Runs a script once with each kind of fault, and compares with the calm run.

A worker is killed and replaced by a copy of another; it is killed and replaced by a new process; the run is stopped and
resumed on another number of workers. Each happens at a step, in the middle of an epoch.
"""

import re
import shutil
from dataclasses import dataclass, replace

from lockstep.lanes import Assignment
from lockstep.launch.channels.exits import NO_MOMENT, TERMINATED
from lockstep.launch.launch import Job
from lockstep.launch.supervision.messages import count
from lockstep.programs.verification.runs import (
    BEGIN_ALIKE,
    Ran,
    Request,
    Running,
    Variant,
    job_of,
    launched,
    refuse_end,
    trace_folder,
)
from lockstep.settings.faults import FAULT, Fault, FaultKind, forget, has_happened
from lockstep.verify.evidence import RunTrace, difference_after, read_disturbed
from lockstep.verify.fault_cause import AppliedFault, judge_fault

FEWEST_STEPS = 4
LEAD = 2
"""How many steps a run makes after the request to stop: in the next one all agree on it, and then they save."""

AFTER = 5
"""How many steps there should be after a fault: a new worker joins two steps later, and computes from the third on."""

FAULT_BUDGET = 4


@dataclass(frozen=True)
class FaultResult:
    """The result of a disturbed run. `cause` is why it differs or has failed, or a note on one that is equal."""

    kind: FaultKind
    label: str
    equal: bool
    cause: str | None = None
    first_step: int | None = None
    explanation: str = ""
    num_steps: int | None = None
    digest: str = ""


def disturb(request: Request, calm: RunTrace, running: Running) -> list[FaultResult]:
    """The result of each fault; nothing if the script makes too few steps. `calm` is the run on the most workers."""
    step = fault_step(calm)
    if step is None:
        return []
    killed = [_killed(request, calm, kind, step, running) for kind in (FaultKind.KILL, FaultKind.REPLACE)]
    return [*killed, _stopped(request, calm, step, killed[0].equal, running)]


def fault_step(calm: RunTrace) -> int | None:
    """The step at which faults happen: near the middle, neither the first nor the last of an epoch, if there is one.

    None if there are too few steps.
    """
    states = calm.workers[0].states
    first, last = min(states), max(states)
    if last - first < FEWEST_STEPS:
        return None
    possible = range(first + LEAD, last - 1)
    inside = [step for step in possible if states[step].batch != 0 and states[step + 1].batch != 0]
    roomy = [step for step in inside if last - step > AFTER]
    return min(roomy or inside or possible, key=lambda step: abs(step - (first + last) // 2))


def resumed_on(counts: tuple[int, ...]) -> int:
    """Another number of workers than the largest."""
    return min((number for number in counts if number < max(counts)), default=max(counts) - 1)


# -- a worker is killed ------------------------------------------------------------------------------------------


def _killed(request: Request, calm: RunTrace, kind: FaultKind, step: int, running: Running) -> FaultResult:
    most = max(request.counts)
    fault = Fault(kind, min(most, request.lanes) - 1, step)
    how = "copied" if kind is FaultKind.KILL else "new process"
    label = f"killed at step {step}, {how}"
    job = replace(_job(request, label, kind, most, fault), copies=kind is FaultKind.KILL, fault_budget=FAULT_BUDGET)
    ran = _launched(job, f"{count(most, 'worker')}, worker {fault.slot} {label}", running)
    refuse_end(ran)
    blank = FaultResult(kind, label, equal=False)
    if ran.outcome.exit_code or not has_happened(job.run_dir):
        return _failed(blank, ran, calm)
    trace = read_disturbed(label, [trace_folder(job.run_dir)])
    return _compared(blank, calm, trace, AppliedFault(step, fault.slot), _note(ran, trace, fault))


def _note(ran: Ran, trace: RunTrace, fault: Fault) -> str | None:
    if ran.outcome.turned_away:
        sentence = re.sub(r"^this worker (?:leaves|cannot join) at step \d+: ", "", ran.outcome.turned_away[0])
        return f"a worker that joins is sent away: {sentence}"
    if ran.outcome.obstacles and fault.kind is FaultKind.KILL:
        return (
            f"no worker can be copied ({ran.outcome.obstacles[0]}): a new process takes the place of one that is lost"
        )
    if not any(lane.worker == fault.slot for (step, _), lane in trace.lanes.items() if step >= fault.step):
        return "the script ended before its replacement had computed anything"
    return None


# -- a run is stopped and resumed ----------------------------------------------------------------------------------


def _stopped(request: Request, calm: RunTrace, step: int, may_move: bool, running: Running) -> FaultResult:
    most, other = max(request.counts), resumed_on(request.counts)
    label = f"stopped at step {step}, resumed on {other}"
    stopping = _with_checkpoints(
        request, _job(request, label, FaultKind.STOP, most, Fault(FaultKind.STOP, 0, step - LEAD))
    )
    blank = FaultResult(FaultKind.STOP, label, equal=False)
    ran = _launched(stopping, f"{count(most, 'worker')}, stopped at step {step}", running)
    if ran.outcome.exit_code != TERMINATED or not has_happened(stopping.run_dir):
        refuse_end(ran)
        return _failed(blank, ran, calm)
    if not ran.outcome.saved:
        late = f"{NO_MOMENT}, within two seconds"
        notes = (note for note in ran.notes if "checkpoint" in note or "saved" in note)
        return replace(blank, cause=next(notes, f"nothing was saved when the run was stopped: {late}"), first_step=step)
    going_on = _with_checkpoints(request, replace(_job(request, label, "resumed", other), resume="auto"))
    ran = _launched(going_on, f"{count(other, 'worker')}, resumed", running)
    refuse_end(ran)
    if ran.outcome.exit_code:
        return _failed(blank, ran, calm)
    folders = [trace_folder(job.run_dir) for job in (stopping, going_on)]
    resumed = read_disturbed(label, folders[1:])
    first = min((worker.first_step for worker in resumed.workers), default=step)
    return _compared(blank, calm, read_disturbed(label, folders), AppliedFault(first, may_move=may_move), None)


def _with_checkpoints(request: Request, job: Job) -> Job:
    """With checkpoints in a folder of this verification, not in the script's, which may hold older ones."""
    return replace(job, checkpoints=(request.folder / "checkpoints").absolute())


# -- all of them -------------------------------------------------------------------------------------------------


def _job(request: Request, label: str, name: str, num_workers: int, fault: Fault | None = None) -> Job:
    """As `lockstep run` would launch it, and with traces."""
    variant = Variant(str(name), label, Assignment.even(request.lanes, num_workers), request.steps)
    job = replace(job_of(request, variant), assignment=None)
    return replace(job, environment={**job.environment, **({} if fault is None else {FAULT: str(fault)})})


def _launched(job: Job, label: str, running: Running) -> Ran:
    """Launches into an empty folder: what an earlier verification left there is removed."""
    forget(job.run_dir)
    if job.resume is None and job.checkpoints is not None:
        shutil.rmtree(job.checkpoints, ignore_errors=True)
    return launched(job, label, running)


def _compared(
    blank: FaultResult, calm: RunTrace, trace: RunTrace, fault: AppliedFault, note: str | None
) -> FaultResult:
    difference = difference_after(calm, trace)
    last = trace.last_step
    digest = next((worker.states[last].digest for worker in trace.workers if last in worker.states), "")
    seen = replace(blank, num_steps=last - calm.workers[0].first_step, digest=digest)
    if difference is None:
        return replace(seen, equal=True, cause=note)
    likely = judge_fault(difference, fault)
    return replace(seen, cause=str(likely.cause), explanation=likely.explanation, first_step=difference.step)


def _failed(blank: FaultResult, ran: Ran, calm: RunTrace) -> FaultResult:
    """A run that refused to go on has reported why."""
    failure, output = ran.outcome.failure, "\n".join(ran.output)
    if failure is not None:
        return replace(blank, cause=failure.sentence or output, first_step=failure.step, explanation=output)
    trace = read_disturbed("", [trace_folder(ran.job.run_dir)])
    first = min((worker.first_step for worker in trace.workers), default=0)
    why = "the script ended before the fault could happen"
    if first > calm.workers[0].first_step:
        why = f"the script went on at step {first}, from a checkpoint of an earlier run: {BEGIN_ALIKE}"
    return replace(blank, cause=output or why)
