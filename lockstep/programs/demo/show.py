"""The demo: one model trained on several numbers of workers, one after the other, and what became of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lockstep.errors import BadArgument, LockstepError
from lockstep.observe.progress import Shown, show_progress
from lockstep.programs.demo.recipe import Recipe
from lockstep.programs.demo.result import Reader, Result, Verdict, judge, workers
from lockstep.run.launching.launch import Job, Outcome, launch

WORKER = "lockstep.programs.demo.worker"


class DidNotFinish(LockstepError):  # noqa: N818
    """A run of the demo ended early; what there is to tell has been told. `exit_code` is the launch's."""

    def __init__(self, num_workers: int, exit_code: int) -> None:
        super().__init__(f"the demo ended early, in its run on {workers(num_workers)}")
        self.exit_code = exit_code


@dataclass(frozen=True)
class Demonstration:
    """All runs of a demo, at least one, and what they show."""

    recipe: Recipe
    results: tuple[Result, ...]
    verdict: Verdict


def demonstrate(recipe: Recipe, worker_counts: Sequence[int], out: Path, console: Console) -> Demonstration:
    """Trains the recipe on each number of workers, with progress on the console and logs in `out`.

    Raises DidNotFinish when a run fails or is stopped by Ctrl-C; no process is left then either.
    """
    check_recipe(recipe, worker_counts)
    folders = {count: make_folder(out, count) for count in worker_counts}
    results = tuple(train(recipe, count, folders[count], console) for count in worker_counts)
    return Demonstration(recipe, results, judge(results))


def train(recipe: Recipe, num_workers: int, run_dir: Path, console: Console) -> Result:
    """One run to its end; its result is complete."""
    result = Result(num_workers, recipe.tokens_per_step)
    with show_progress(console, f"{workers(num_workers):<9}", recipe.steps) as shown:
        reader = Reader(result, time.monotonic, lambda now: _show(shown, now), shown.say)
        outcome = launch(_job(recipe, num_workers, run_dir), show=reader, say=shown.say)
    _require_end(result, outcome)
    result.seconds = outcome.seconds
    return result


def check_recipe(recipe: Recipe, worker_counts: Sequence[int]) -> None:
    """Raises unless the demo can be run with these words."""
    if recipe.steps < 1:
        raise BadArgument(f"the demo needs at least 1 step, not {recipe.steps}")
    if not worker_counts or len(set(worker_counts)) < len(worker_counts):
        raise BadArgument(f"name each number of workers once, not {','.join(map(str, worker_counts))!r}")
    for count in worker_counts:
        if not 1 <= count <= recipe.lanes:
            raise BadArgument(f"the demo runs on 1 to {recipe.lanes} workers, one for each lane, not {count}")


def make_folder(out: Path, num_workers: int) -> Path:
    """The folder for the logs of one run, inside of the report's."""
    folder = out / "logs" / f"workers-{num_workers}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArgument(
            f"no report can be written to {out}: {error.strerror}; name a folder, or one that can be made"
        ) from error
    return folder


def _job(recipe: Recipe, num_workers: int, run_dir: Path) -> Job:
    return Job(WORKER, run_dir, module=True, arguments=(recipe.write(),), num_workers=num_workers)


def _show(shown: Shown, result: Result) -> None:
    shown.at(len(result.losses), f"loss {result.losses[-1]:.3f}  {result.tokens_per_s:>6,.0f} tokens/s")


def _require_end(result: Result, outcome: Outcome) -> None:
    if outcome.exit_code:
        raise DidNotFinish(result.num_workers, outcome.exit_code)
    if not result.complete:
        raise DidNotFinish(result.num_workers, exit_code=1)
