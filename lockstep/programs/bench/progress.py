"""How far a benchmark is: a bar on a terminal; elsewhere a line for each named activity, and for the end of a part."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.programs.bench.rounds import BenchPart, Follow, RoundsDone

if TYPE_CHECKING:
    from rich.console import Console


class RoundLines:
    """Takes worker 0's output as it comes and passes on the progress in it."""

    def __init__(self, follow: Callable[[RoundsDone], None]) -> None:
        self._follow, self._rest = follow, b""

    def __call__(self, output: bytes) -> None:
        *lines, self._rest = (self._rest + output).split(b"\n")
        for line in lines:
            if (progress := RoundsDone.read(line.decode(errors="replace"))) is not None:
                self._follow(progress)


@contextmanager
def show_progress(console: "Console", parts: Sequence[BenchPart]) -> Iterator[Follow]:
    """Yields the function that shows on `console` how far the parts are."""
    from rich.markup import escape  # takes longer to import than help may
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        yield lambda part, progress: _print_line(console, part, progress)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=sum(part.rounds for part in parts))

        def follow(part: BenchPart, progress: RoundsDone) -> None:
            before = sum(earlier.rounds for earlier in parts[: parts.index(part)])
            bar.update(task, description=escape(_title(part, progress)), completed=before + progress.done)

        yield follow


def _print_line(console: "Console", part: BenchPart, progress: RoundsDone) -> None:
    if progress.doing:
        console.print(_title(part, progress), markup=False, highlight=False, soft_wrap=True)
    elif progress.done == progress.total:
        console.print(f"{part.title}: done", markup=False, highlight=False, soft_wrap=True)


def _title(part: BenchPart, progress: RoundsDone) -> str:
    return f"{part.title}: {progress.doing}" if progress.doing else part.title
