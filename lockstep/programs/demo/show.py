"""The demo: one model trained on several numbers of workers, one after the other, and what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lockstep.errors import BadArgument
from lockstep.programs.demo.disturbance import Disturbed, check_kill, disturb
from lockstep.programs.demo.recipe import Recipe
from lockstep.programs.demo.result import Result, Verdict, judge
from lockstep.programs.demo.training import train


@dataclass(frozen=True)
class Demonstration:
    """All runs of a demo, at least one, and what they show; `disturbed` is the one whose workers were killed."""

    recipe: Recipe
    results: tuple[Result, ...]
    verdict: Verdict
    disturbed: Disturbed | None = None

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What the demo has to say; that one run in peace has no other beside it, only if it has none at all."""
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
    """Trains the recipe on each number of workers, with progress on the console and logs in `out`.

    With `kill` once more on the most of them, while workers are killed. Raises DidNotFinish when a run fails or is
    stopped by Ctrl-C; no process is left then either.
    """
    check_recipe(recipe, worker_counts)
    if kill:
        check_kill(recipe, worker_counts)
    folders = {count: make_folder(out, f"workers-{count}") for count in worker_counts}
    results = tuple(train(recipe, count, folders[count], console) for count in worker_counts)
    disturbed = None
    if kill:
        most = max(results, key=lambda result: result.num_workers)
        disturbed = disturb(recipe, most, make_folder(out, "with-kills"), console)
    return Demonstration(recipe, results, judge(results), disturbed)


def check_recipe(recipe: Recipe, worker_counts: Sequence[int]) -> None:
    """Raises unless the demo can be run with these words."""
    if recipe.steps < 1:
        raise BadArgument(f"the demo needs at least 1 step, not {recipe.steps}")
    if not worker_counts or len(set(worker_counts)) < len(worker_counts):
        raise BadArgument(f"name each number of workers once, not {','.join(map(str, worker_counts))!r}")
    for count in worker_counts:
        if not 1 <= count <= recipe.lanes:
            raise BadArgument(f"the demo runs on 1 to {recipe.lanes} workers, one for each lane, not {count}")


def make_folder(out: Path, name: str) -> Path:
    """The folder for the logs of one run, inside of the report's."""
    folder = out / "logs" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArgument(
            f"no report can be written to {out}: {error.strerror}; name a folder, or one that can be made"
        ) from error
    return folder
