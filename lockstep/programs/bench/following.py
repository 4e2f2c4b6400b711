"""Progress of a benchmark: a bar on a terminal; elsewhere a line for what comes before a part's rounds, and its end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from lockstep.programs.bench.result import Progress


class Part(Protocol):
    """What is measured in `rounds` rounds under one title. No two parts of a benchmark are equal."""

    @property
    def title(self) -> str: ...

    @property
    def rounds(self) -> int: ...


@contextmanager
def following(console: Console, parts: Sequence[Part]) -> Iterator[Callable[[Part, Progress], None]]:
    """What it yields shows on `console` how far the parts are."""
    if not console.is_terminal:
        yield lambda part, progress: _tell(console, part, progress)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=sum(part.rounds for part in parts))
        yield lambda part, progress: bar.update(
            task, description=_title(part, progress), completed=_rounds_before(parts, part) + progress.done
        )


def _tell(console: Console, part: Part, progress: Progress) -> None:
    if progress.doing:
        console.print(_title(part, progress), highlight=False)
    elif progress.done == progress.total:
        console.print(f"{part.title}: done", highlight=False)


def _title(part: Part, progress: Progress) -> str:
    return f"{part.title}: {progress.doing}" if progress.doing else part.title


def _rounds_before(parts: Sequence[Part], part: Part) -> int:
    return sum(earlier.rounds for earlier in parts[: parts.index(part)])
