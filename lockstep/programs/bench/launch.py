"""Launches the workers of a benchmark, and reads what worker 0 leaves. Without torch."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import LockstepError
from lockstep.launch.launch import Job, launch
from lockstep.programs.bench.plan import BenchResult
from lockstep.programs.bench.rounds import Follow, RoundLines

STOPPED = "✗ stopped; all workers have ended"


class ResultsDiffer(LockstepError):  # noqa: N818
    """Two sides computed different things, so their times cannot be compared."""


@dataclass
class BenchStopped(LockstepError):  # noqa: N818
    """The workers did not finish; `exit_code` is the launch's."""

    sentence: str
    exit_code: int
    interrupted: bool

    def __str__(self) -> str:
        return self.sentence


class LaunchedPlan(Protocol):
    """What one launch of workers measures."""

    @property
    def workers(self) -> int: ...

    def written(self) -> str: ...


def bench_launched(plans: Sequence[LaunchedPlan], program: str, follow: Follow, **options: Any) -> dict[str, Any]:
    """Measures every plan, one after the other; returns `machine` and `rows` of the report. Main thread only.

    Workers run the module `program` with the plan and a folder as arguments; `options` are those of the job.
    """
    results = [_measure(plan, program, follow, options) for plan in plans]
    return {"machine": results[-1].machine, "rows": [row for result in results for row in result.rows]}


def _measure(plan: LaunchedPlan, program: str, follow: Follow, options: Mapping[str, Any]) -> BenchResult:
    with result_folder() as folder:
        words, count, messages = (plan.written(), str(folder)), plan.workers, list[str]()
        job = Job(program, folder, module=True, arguments=words, num_workers=count, lanes=count, **options)
        outcome = launch(job, show=RoundLines(follow), say=messages.append)
        if outcome.exit_code:
            # After an interrupt there is nothing to look up, and the folder that the launcher names goes away.
            interrupted = outcome.failure is None
            text = STOPPED if interrupted else "\n".join(messages)
            raise BenchStopped(text, outcome.exit_code, interrupted)
        return accept(BenchResult.find(folder))


def accept(result: BenchResult) -> BenchResult:
    """Raises if the sides did not agree."""
    if result.refused is not None:
        raise ResultsDiffer(result.refused)
    return result


@contextmanager
def result_folder() -> Iterator[Path]:
    """A folder that is removed afterwards, unless a worker failed: then it holds the logs for the user."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    keep = False
    try:
        yield folder
    except BenchStopped as stopped:
        keep = not stopped.interrupted
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def start_program(command: Sequence[str], environment: Mapping[str, str], output: Path) -> "subprocess.Popen[bytes]":
    """Starts it in a session of its own: Ctrl-C reaches the benchmark alone, which ends everything in order."""
    with output.open("wb") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
