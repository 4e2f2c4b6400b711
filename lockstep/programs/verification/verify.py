"""Runs a script on several numbers of workers and compares the bits of every step."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.lanes import Assignment
from lockstep.launch.supervision.messages import count
from lockstep.programs.verification.faults import FEWEST_STEPS, FaultResult, disturb
from lockstep.programs.verification.runs import (
    BEGIN_ALIKE,
    CannotVerify,
    Request,
    Running,
    Variant,
    dump_path,
    run_calm,
)
from lockstep.verify.cause import LikelyCause, explain_sum, judge
from lockstep.verify.evidence import RunTrace, TraceDifference, first_difference


@dataclass(frozen=True)
class VerifyReport:
    """The result. `runs` are all that must be equal, the first is the reference.

    `faults` are the disturbed runs; `untested` is why there are none, although they were requested.
    `summed` explains the distance where the loss is a sum.
    """

    request: Request
    runs: dict[str, RunTrace]
    difference: TraceDifference | None = None
    likely_cause: LikelyCause | None = None
    distance: dict[str, float] = field(default_factory=dict)
    summed: str = ""
    faults: tuple[FaultResult, ...] = ()
    untested: str = ""

    @property
    def equal(self) -> bool:
        return self.difference is None and all(fault.equal for fault in self.faults)

    @property
    def reference(self) -> RunTrace:
        return next(iter(self.runs.values()))


def verify(request: Request, running: Running) -> VerifyReport:
    """Runs the script in every way that must give the same bits; compares, explains a difference."""
    planned = variants(request)
    runs = {variant.name: run_calm(request, variant, running) for variant in planned}
    _check_beginnings(request, list(runs.values()))
    difference = first_difference(list(runs.values()))
    report = VerifyReport(request, runs, difference)
    if difference is not None:
        left = next(variant for variant in planned if runs[variant.name] is difference.left.run)
        again = replace(left, name=f"{left.name}-again", label=f"{left.label}, a second time", dump=False)
        again = replace(again, steps=max(difference.step, 1))  # as far as the difference
        report = replace(report, likely_cause=judge(difference, lambda: run_calm(request, again, running)))
    if request.distance:
        report = _with_distance(report, planned[0], running)
    if not request.faults:
        return report
    if difference is not None:  # faults would show nothing
        return replace(report, untested="the runs differ without any")
    faults = disturb(request, runs[str(max(request.counts))], running)
    few = f"{report.reference.num_steps} steps are too few, {FEWEST_STEPS} are needed"
    return replace(report, faults=tuple(faults), untested="" if faults else few)


def variants(request: Request) -> list[Variant]:
    """Every number of workers with contiguous lanes, and the largest with interleaved ones if they differ."""
    steps, largest = request.steps, max(request.counts)
    planned = [
        Variant(str(number), count(number, "worker"), Assignment.even(request.lanes, number), steps)
        for number in request.counts
    ]
    planned[0] = replace(planned[0], dump=request.distance)
    mixed = interleaved(request.lanes, largest)
    if mixed != Assignment.even(request.lanes, largest):
        label = f"{count(largest, 'worker')}, interleaved lanes"
        planned.append(Variant(f"{largest}-interleaved", label, mixed, steps))
    return planned


def interleaved(num_lanes: int, num_workers: int) -> Assignment:
    """Lane v on worker v mod n."""
    return Assignment(tuple(tuple(range(rank, num_lanes, num_workers)) for rank in range(num_workers)))


def _check_beginnings(request: Request, runs: list[RunTrace]) -> None:
    (first, expected), *others = ((run.label, run.workers[0].first_step) for run in runs)
    for label, step in others:
        if step != expected:
            raise CannotVerify(
                f"✗ {request.program} began at step {expected} with {first}, but at {step} with {label}. "
                f"It went on from a checkpoint of an earlier run: {BEGIN_ALIKE}."
            )


def _with_distance(report: VerifyReport, first: Variant, running: Running) -> VerifyReport:
    """How far each parameter is from one lane on one worker, which is plain PyTorch on the whole batch."""
    request = report.request
    one = Variant("one-lane", "one lane on 1 worker", Assignment.even(1, 1), request.steps, dump=True)
    try:
        alone = run_calm(request, one, running)
    except CannotVerify as failed:
        advice = "  This run holds the whole batch in one lane. --no-distance leaves it out."
        raise CannotVerify(f"{failed}\n{advice}", failed.exit_code) from failed
    distances = _measure(*(dump_path(request.folder / variant.name) for variant in (first, one)))
    distances = only_parameters(distances, alone.workers[0].last.buffers)
    return replace(report, distance=distances, summed=explain_sum(report.reference, alone))


def only_parameters(distances: dict[str, float], buffers: frozenset[str]) -> dict[str, float]:
    """Leaves out buffers and optimizer state, which is named `optimizer/<parameter>/<key>`."""
    named = {name: distance for name, distance in distances.items() if name not in buffers}
    return {name: d for name, d in named.items() if not re.match(r"optimizer\d*/", name)}


def _measure(*dumps: Path) -> dict[str, float]:
    """The relative differences between two final states, in tensors that both have; removes the files."""
    from safetensors.torch import load_file  # imports torch, which takes seconds and is needed only here

    from lockstep.verify.reference import relative_difference

    ours, theirs = map(load_file, dumps)
    for dump in dumps:
        dump.unlink()
    both = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    return relative_difference({n: ours[n] for n in both}, {n: theirs[n] for n in both})
