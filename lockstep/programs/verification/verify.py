"""Runs a script on several numbers of workers and holds the bits of every step against each other."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.lanes import Assignment
from lockstep.run.exits import CTRL_C, ENVIRONMENT, TERMINATED
from lockstep.run.launching.launch import Job, launch
from lockstep.verify.cause import Verdict, judge
from lockstep.verify.compare import Difference, first_difference
from lockstep.verify.evidence import RunTrace, read_run, trace_path

Running = Callable[[str], AbstractContextManager[object]]
"""Told what is run now; the context lasts as long as the run."""


class CannotVerify(LockstepError):  # noqa: N818
    """A run failed, or left nothing to compare. The text is ready to be shown."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Request:
    """What shall be verified. `steps` None means all that the script makes; `folder` exists."""

    program: str
    folder: Path
    counts: tuple[int, ...]
    arguments: tuple[str, ...] = ()
    module: bool = False
    lanes: int = 8
    threads: int = 1
    seed: int | None = None
    steps: int | None = None
    distance: bool = True
    device: str | None = None


@dataclass(frozen=True)
class Report:
    """What came out. `runs` are all that must be equal, the first is the reference."""

    request: Request
    runs: dict[str, RunTrace]
    difference: Difference | None = None
    verdict: Verdict | None = None
    distance: dict[str, float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return self.difference is None

    @property
    def reference(self) -> RunTrace:
        return next(iter(self.runs.values()))


@dataclass(frozen=True)
class Variant:
    """One way to run the script; its name is also that of its folder."""

    name: str
    label: str
    assignment: Assignment
    steps: int | None
    dump: bool = False


def verify(request: Request, running: Running) -> Report:
    """Runs the script in every way that must give the same bits; compares, explains a difference."""
    planned = variants(request)
    runs = {variant.name: _run(request, variant, running) for variant in planned}
    _check_beginnings(request, list(runs.values()))
    report = Report(request, runs, first_difference(list(runs.values())))
    if report.difference is not None:
        verdict = judge(report.difference, lambda: _again(request, planned, report, running))
        report = replace(report, verdict=verdict)
    if request.distance:
        report = replace(report, distance=_distance(request, planned[0], running))
    return report


def variants(request: Request) -> list[Variant]:
    """Every number of workers with contiguous lanes, and the largest with interleaved ones if they differ."""
    steps, largest = request.steps, max(request.counts)
    planned = [
        Variant(str(count), workers(count), Assignment.even(request.lanes, count), steps) for count in request.counts
    ]
    planned[0] = replace(planned[0], dump=request.distance)
    mixed = interleaved(request.lanes, largest)
    if mixed != Assignment.even(request.lanes, largest):
        label = f"{workers(largest)}, interleaved lanes"
        planned.append(Variant(f"{largest}-interleaved", label, mixed, steps))
    return planned


def interleaved(num_lanes: int, num_workers: int) -> Assignment:
    """Lane v on worker v mod n."""
    return Assignment(tuple(tuple(range(rank, num_lanes, num_workers)) for rank in range(num_workers)))


def workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _again(request: Request, planned: list[Variant], report: Report, running: Running) -> RunTrace:
    """The left run of the difference, a second time, as far as the difference."""
    assert report.difference is not None
    first = next(v for v in planned if report.runs[v.name] is report.difference.left.run)
    second = replace(
        first,
        name=f"{first.name}-again",
        label=f"{first.label}, a second time",
        steps=max(report.difference.step, 1),
        dump=False,
    )
    return _run(request, second, running)


def _run(request: Request, variant: Variant, running: Running) -> RunTrace:
    """Launches one variant and reads what its workers wrote down."""
    folder = request.folder / variant.name
    paths = [trace_path(folder / "trace", rank) for rank in range(variant.assignment.num_workers)]
    folder.mkdir(exist_ok=True)
    for path in paths:
        path.unlink(missing_ok=True)
    said: list[str] = []
    with running(variant.label):
        outcome = launch(_job(request, variant, folder), show=lambda _: None, say=said.append)
    if outcome.exit_code:
        exit_code = outcome.exit_code if outcome.exit_code in (CTRL_C, TERMINATED, ENVIRONMENT) else 1
        raise CannotVerify("\n".join(said), exit_code)
    return _read(request, variant, paths)


def _job(request: Request, variant: Variant, folder: Path) -> Job:
    environment = {"LOCKSTEP_TRACE_DIR": str((folder / "trace").absolute())}
    if variant.steps is not None:
        environment["LOCKSTEP_STOP_AFTER"] = str(variant.steps)
    if variant.dump:
        environment["LOCKSTEP_DUMP"] = str(_dump_path(folder).absolute())
    return Job(
        program=request.program,
        run_dir=folder,
        module=request.module,
        arguments=request.arguments,
        num_workers=variant.assignment.num_workers,
        threads=request.threads,
        lanes=variant.assignment.num_lanes,
        seed=request.seed,
        device=request.device,
        assignment=variant.assignment.lanes_of,
        environment=environment,
        is_run=False,  # a script that starts none is told so here, by its traces
    )


def _read(request: Request, variant: Variant, paths: list[Path]) -> RunTrace:
    missing = f"so there is nothing to compare. Logs: {request.folder / variant.name}"
    if not all(path.exists() for path in paths):
        raise CannotVerify(f"✗ {request.program} never called lockstep.start(), {missing}")
    run = read_run(variant.label, paths)
    if run.num_steps == 0:
        raise CannotVerify(
            f"✗ {request.program} made no training step (a `for ... in run.lanes(batch)` loop with the model "
            f"in training mode), {missing}"
        )
    return run


def _check_beginnings(request: Request, runs: list[RunTrace]) -> None:
    (first, expected), *others = ((run.label, run.workers[0].first_step) for run in runs)
    for label, step in others:
        if step != expected:
            raise CannotVerify(
                f"✗ {request.program} began at step {expected} with {first}, but at {step} with {label}. "
                "It went on from a checkpoint of an earlier run: let it begin at the same point each time."
            )


def _distance(request: Request, first: Variant, running: Running) -> dict[str, float]:
    """How far each parameter is from one lane on one worker, which is plain PyTorch on the whole batch."""
    one = Variant("one-lane", "one lane on 1 worker", Assignment.even(1, 1), request.steps, dump=True)
    try:
        buffers = _run(request, one, running).workers[0].last.buffers
    except CannotVerify as failed:
        advice = "  This run holds the whole batch in one lane. --no-distance leaves it out."
        raise CannotVerify(f"{failed}\n{advice}", failed.exit_code) from failed
    distances = _measure(*(_dump_path(request.folder / variant.name) for variant in (first, one)))
    return only_parameters(distances, buffers)


def only_parameters(distances: dict[str, float], buffers: frozenset[str]) -> dict[str, float]:
    """Leaves out buffers and optimizer state, which is named `optimizer/<parameter>/<key>`."""
    named = {name: distance for name, distance in distances.items() if name not in buffers}
    return {name: d for name, d in named.items() if not re.match(r"optimizer\d*/", name)}


def _measure(*dumps: Path) -> dict[str, float]:
    """The relative differences between two final states, in tensors that both have; removes the files."""
    from safetensors.torch import load_file  # imports torch: seconds that the runs before need not wait for

    from lockstep.verify.reference import relative_difference

    ours, theirs = map(load_file, dumps)
    for dump in dumps:
        dump.unlink()
    both = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    return relative_difference({n: ours[n] for n in both}, {n: theirs[n] for n in both})


def _dump_path(folder: Path) -> Path:
    return folder / "final.safetensors"
