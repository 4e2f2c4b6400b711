"""One run of the demo, from its start to its end."""

import time
from pathlib import Path

from rich.console import Console

from lockstep.errors import LockstepError
from lockstep.launch.launch import Job, LaunchOutcome, launch
from lockstep.observe.progress import Shown, show_progress
from lockstep.programs.demo.recipe import Recipe
from lockstep.programs.demo.result import Reader, Result, workers

WORKER = "lockstep.programs.demo.worker"


class DidNotFinish(LockstepError):  # noqa: N818
    """A run of the demo ended early; what there is to tell has been told. `exit_code` is the launch's."""

    def __init__(self, num_workers: int, exit_code: int) -> None:
        super().__init__(f"the demo ended early, in its run on {workers(num_workers)}")
        self.exit_code = exit_code


def train(recipe: Recipe, num_workers: int, run_dir: Path, console: Console) -> Result:
    """One run to its end; its result is complete."""
    result = Result(num_workers, recipe.tokens_per_step)
    with show_progress(console, f"{workers(num_workers):<9}", recipe.steps) as shown:
        reader = Reader(result, time.monotonic, lambda now: show_step(shown, now), shown.say)
        outcome = launch(job_of(recipe, num_workers, run_dir), show=reader, say=shown.say)
    return finished(result, outcome)


def job_of(recipe: Recipe, num_workers: int, run_dir: Path) -> Job:
    arguments = (recipe.write(),)
    return Job(WORKER, run_dir, module=True, arguments=arguments, num_workers=num_workers, device=recipe.device)


def show_step(shown: Shown, result: Result) -> None:
    shown.at(len(result.losses), f"loss {result.losses[-1]:.3f}  {result.tokens_per_s:>6,.0f} tokens/s")


def finished(result: Result, outcome: LaunchOutcome) -> Result:
    """The result of a run that came to its end; raises DidNotFinish if it did not."""
    if outcome.exit_code:
        raise DidNotFinish(result.num_workers, outcome.exit_code)
    if not result.complete:
        raise DidNotFinish(result.num_workers, exit_code=1)
    result.seconds = outcome.seconds
    return result
