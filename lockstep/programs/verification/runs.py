"""One run of a script that is verified: the request, the launch, and the traces that it leaves."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.lanes import Assignment
from lockstep.launch.channels.exits import CTRL_C, ENVIRONMENT, TERMINATED
from lockstep.launch.host.folder import log_path
from lockstep.launch.launch import Job, LaunchOutcome, launch
from lockstep.verify.evidence import RunTrace, read_run, trace_path, trace_paths

Running = Callable[[str], AbstractContextManager[object]]
"""Called with what is run now; the context lasts as long as the run."""

NOTE = "  note: "
"""How a line of the run itself begins, among those of the script."""

BEGIN_ALIKE = "let it begin at the same point each time"


class CannotVerify(LockstepError):  # noqa: N818
    """A run failed, or left nothing to compare. The text is ready to be shown."""

    def __init__(self, text: str, exit_code: int = 1, cause: str = "") -> None:
        """`cause` is the run's own whole sentence; in the text it may be cut short."""
        super().__init__(text)
        self.exit_code, self.cause = exit_code, cause


@dataclass(frozen=True)
class Request:
    """What to verify. `steps` None means all that the script makes; `folder` exists."""

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
    faults: bool = True
    device: str | None = None
    strategy: str | None = None


@dataclass(frozen=True)
class Variant:
    """One way to run the script; its name is also that of its folder."""

    name: str
    label: str
    assignment: Assignment
    steps: int | None
    dump: bool = False


def run_calm(request: Request, variant: Variant, running: Running) -> RunTrace:
    """Launches one variant, to which nothing happens, and reads what its workers wrote."""
    ran = launched(job_of(request, variant), variant.label, running)
    refuse_end(ran)
    if ran.outcome.exit_code:
        failure = ran.outcome.failure
        raise CannotVerify("\n".join(ran.output), cause="" if failure is None else failure.sentence)
    return _read(request, variant)


@dataclass(frozen=True)
class Ran:
    """The outcome of a launch, and the lines that the launcher wrote meanwhile."""

    job: Job
    outcome: LaunchOutcome
    output: list[str]

    @property
    def notes(self) -> list[str]:
        """The notes of the run to its user, in the log of worker 0."""
        lines = log_path(self.job.run_dir, 0).read_text(encoding="utf-8", errors="replace").splitlines()
        return [line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)]


def launched(job: Job, label: str, running: Running) -> Ran:
    """Runs the job to its end; no trace of an earlier one is left in its folder."""
    job.run_dir.mkdir(parents=True, exist_ok=True)
    for path in trace_paths(trace_folder(job.run_dir)):
        path.unlink()
    output: list[str] = []
    with running(label):
        outcome = launch(job, show=lambda _: None, say=output.append)
    return Ran(job, outcome, output)


def refuse_end(ran: Ran) -> None:
    """Raises if the user, or the environment, has ended the run: that shows nothing about the script."""
    if ran.outcome.exit_code in (CTRL_C, TERMINATED, ENVIRONMENT):
        raise CannotVerify("\n".join(ran.output), ran.outcome.exit_code)


def job_of(request: Request, variant: Variant) -> Job:
    folder = request.folder / variant.name
    environment = {"LOCKSTEP_TRACE_DIR": str(trace_folder(folder).absolute())}
    if variant.steps is not None:
        environment["LOCKSTEP_STOP_AFTER"] = str(variant.steps)
    if variant.dump:
        environment["LOCKSTEP_DUMP"] = str(dump_path(folder).absolute())
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
        strategy=request.strategy,
        assignment=variant.assignment.lanes_of,
        environment=environment,
        is_run=False,  # a script that starts no run is found here by its traces
    )


def trace_folder(run_dir: Path) -> Path:
    return run_dir / "trace"


def dump_path(folder: Path) -> Path:
    return folder / "final.safetensors"


def _read(request: Request, variant: Variant) -> RunTrace:
    folder = trace_folder(request.folder / variant.name)
    paths = [trace_path(folder, rank) for rank in range(variant.assignment.num_workers)]
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
