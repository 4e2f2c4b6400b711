"""The demo: one model trained on several numbers of workers, and once more while workers are killed."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from lockstep.errors import BadArgument, LockstepError
from lockstep.events import Subscriber
from lockstep.launch.launch import Job, LaunchOutcome, launch
from lockstep.launch.pools.local_pool import LocalPool
from lockstep.launch.scale import find_launcher
from lockstep.launch.supervision.messages import count
from lockstep.observe.history import WorkerHistory
from lockstep.observe.journal import Journal
from lockstep.observe.page.entries import FILES
from lockstep.observe.progress import Shown, show_progress
from lockstep.programs.demo.kills import STEPS_PER_KILL, Killer, KillPlan, KillRecord, living_members
from lockstep.programs.demo.recipe import Recipe
from lockstep.programs.demo.result import DemoResult, DemoVerdict, Reader, judge, judge_disturbed

WORKER = "lockstep.programs.demo.worker"
SPARES = 1
MORE_LOSSES = 4
"""So many losses more than the plan's do not end the demo: other things go wrong on a busy host."""


class DidNotFinish(LockstepError):  # noqa: N818
    """A run of the demo ended early; the launcher has reported why. `exit_code` is the launch's."""

    def __init__(self, num_workers: int, exit_code: int) -> None:
        super().__init__(f"the demo ended early, in its run on {count(num_workers, 'worker')}")
        self.exit_code = exit_code


@dataclass(frozen=True)
class Disturbed:
    """The run whose workers were killed, the one in peace on as many workers, and what the two show."""

    undisturbed: DemoResult
    result: DemoResult
    kills: tuple[KillRecord, ...]
    verdict: DemoVerdict

    @property
    def longest_pause_s(self) -> float:
        """The longest time from a kill to the next step that was done without the victim."""
        return max((kill.pause_s for kill in self.kills if kill.pause_s is not None), default=0.0)


@dataclass(frozen=True)
class Demonstration:
    """All runs of a demo, at least one, and what they show; `disturbed` is the one whose workers were killed."""

    recipe: Recipe
    results: tuple[DemoResult, ...]
    verdict: DemoVerdict
    disturbed: Disturbed | None = None
    folders: tuple[Path, ...] = ()
    """Those of the runs, in their order."""

    @property
    def verdicts(self) -> tuple[DemoVerdict, ...]:
        """The comparisons that the demo shows. A single calm run is mentioned only if there is nothing else."""
        if self.disturbed is None:
            return (self.verdict,)
        own = (self.verdict,) if len(self.results) > 1 else ()
        return (*own, self.disturbed.verdict)

    @property
    def equal(self) -> bool:
        """Whether everything that was trained, in peace or not, is the same model."""
        return all(verdict.equal for verdict in self.verdicts)


def demonstrate(
    recipe: Recipe, worker_counts: Sequence[int], out: Path, console: Console, *, kill: bool = False
) -> Demonstration:
    """Trains the recipe on each number of workers, with progress on the console and a folder in `out` for each run.

    With `kill` once more on the most of them, while workers are killed. Raises DidNotFinish when a run fails or is
    stopped by Ctrl-C; no process is left then either.
    """
    check(recipe, worker_counts, kill)
    names = [f"workers-{number}" for number in worker_counts] + ["with-kills"] * kill
    folders = tuple(make_folder(out, name) for name in names)
    results = tuple(
        train(recipe, number, folder, console) for number, folder in zip(worker_counts, folders, strict=not kill)
    )
    disturbed = None
    if kill:
        most = max(results, key=lambda result: result.num_workers)
        disturbed = disturb(recipe, most, folders[-1], console)
    return Demonstration(recipe, results, judge(results), disturbed, folders)


def check(recipe: Recipe, worker_counts: Sequence[int], kill: bool) -> None:
    """Raises if the demo cannot run the recipe on these numbers of workers, or has nobody or no time to kill."""
    if recipe.steps < 1:
        raise BadArgument(f"the demo needs at least 1 step, not {recipe.steps}")
    if not worker_counts or len(set(worker_counts)) < len(worker_counts):
        raise BadArgument(f"name each number of workers once, not {','.join(map(str, worker_counts))!r}")
    for number in worker_counts:
        if not 1 <= number <= recipe.lanes:
            raise BadArgument(f"the demo runs on 1 to {recipe.lanes} workers, one for each lane, not {number}")
    if kill and max(worker_counts) < 2:
        raise BadArgument("--kill needs a run on 2 workers or more, for somebody has to go on: give --workers 1,2")
    if kill and recipe.steps < STEPS_PER_KILL:
        raise BadArgument(f"--kill needs {STEPS_PER_KILL} steps or more, not {recipe.steps}")


def make_folder(out: Path, name: str) -> Path:
    """The folder of one run, inside of the report's, without what an earlier demo has left there to be shown."""
    folder = out / "logs" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = (*map(folder.joinpath, FILES), *folder.glob("worker-*.log"))
        for file in earlier if find_launcher(folder) is None else ():  # else the launch is refused
            file.unlink(missing_ok=True)
    except OSError as error:
        raise BadArgument(
            f"no report can be written to {out}: {error.strerror}; name a folder, or one that can be made"
        ) from error
    return folder


def train(recipe: Recipe, num_workers: int, folder: Path, console: Console) -> DemoResult:
    """Trains to the end; returns the complete result."""
    result = DemoResult(num_workers, recipe.tokens_per_step)
    with show_progress(console, f"{count(num_workers, 'worker'):<9}", recipe.steps) as shown:
        reader = Reader(result, time.monotonic, lambda now: show_step(shown, now), shown.say)
        return finished(result, launched(job_of(recipe, num_workers, folder), reader, shown.say))


def disturb(recipe: Recipe, undisturbed: DemoResult, folder: Path, console: Console) -> Disturbed:
    """Trains once more as `undisturbed` was, with kills by SIGKILL, each shown as it happens, to the end."""
    plan = KillPlan(recipe.steps, undisturbed.num_workers, recipe.seed)
    job = job_of(recipe, undisturbed.num_workers, folder)
    job = replace(job, spares=SPARES, fault_budget=plan.num_kills + MORE_LOSSES)
    result = DemoResult(undisturbed.num_workers, recipe.tokens_per_step)
    with show_progress(console, "with kills", recipe.steps) as shown:
        killers: list[Killer] = []

        def open_pool(*arguments: Any) -> LocalPool:
            pool = LocalPool(*arguments)
            kill = partial(pool.send, signum=signal.SIGKILL)
            killers.append(Killer(plan, partial(living_members, pool), kill, time.monotonic, shown.say))
            return pool

        def stepped(now: DemoResult) -> None:
            show_step(shown, now)
            killers[0].stepped(len(now.losses))

        def other(line: str) -> None:
            shown.say(line)
            killers[0].read_line(line)

        reader = Reader(result, time.monotonic, stepped, other)
        finished(result, launched(job, reader, other, open_pool=open_pool))
    kills = tuple(killers[0].kills)
    return Disturbed(undisturbed, result, kills, judge_disturbed(undisturbed, result, len(kills)))


def job_of(recipe: Recipe, num_workers: int, folder: Path) -> Job:
    arguments = (recipe.write(),)
    return Job(WORKER, folder, module=True, arguments=arguments, num_workers=num_workers, device=recipe.device)


def launched(job: Job, reader: Reader, say: Callable[[str], None], **pool: Any) -> LaunchOutcome:
    """Runs the job to its end, and leaves in its folder what `lockstep page` and `lockstep report` show."""
    readers: list[Subscriber] = [Journal(job.run_dir, say), WorkerHistory(job.run_dir, say)]
    return launch(job, show=reader, say=say, readers=readers, **pool)


def show_step(shown: Shown, result: DemoResult) -> None:
    shown.at(len(result.losses), f"loss {result.losses[-1]:.3f}  {result.tokens_per_s:>6,.0f} tokens/s")


def finished(result: DemoResult, outcome: LaunchOutcome) -> DemoResult:
    """The result of a finished run; raises DidNotFinish if the run has not finished."""
    if outcome.exit_code:
        raise DidNotFinish(result.num_workers, outcome.exit_code)
    if not result.complete:
        raise DidNotFinish(result.num_workers, exit_code=1)
    result.seconds = outcome.seconds
    return result
