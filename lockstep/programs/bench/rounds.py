"""Rounds: in which order sides are timed, how far that is, and how it is shown. Without torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

_MARK = "bench-progress "

T = TypeVar("T")


@dataclass(frozen=True)
class RoundsDone:
    """Rounds done, of how many; `doing` is the present activity, where that is not a round."""

    done: int
    total: int
    doing: str = ""

    def written(self) -> str:
        return f"{_MARK}{self.done} {self.total}"

    @classmethod
    def read(cls, line: str) -> "RoundsDone | None":
        """What `written` wrote; None for any other line of a worker's output."""
        if not line.startswith(_MARK):
            return None
        done, total = line.removeprefix(_MARK).split()
        return cls(int(done), int(total))


class BenchPart(Protocol):
    """What is measured in `rounds` rounds under one title. No two parts of a benchmark are equal."""

    @property
    def title(self) -> str: ...

    @property
    def rounds(self) -> int: ...


Follow = Callable[[BenchPart, RoundsDone], None]
"""Takes how far a part is: before its processes start, and after every round."""


def order(sides: Sequence[str], round_number: int) -> tuple[str, ...]:
    """The sides in the order of one round.

    In as many rounds as there are sides every side is once in every position; the next ones run backwards, so that a
    side follows another as often as that follows it. Neither a slow drift of the machine nor the caches of the side
    before favour one of them.
    """
    shift = round_number % len(sides)
    turned = (*sides[shift:], *sides[:shift])
    return turned[::-1] if round_number // len(sides) % 2 else turned


def timed_rounds(
    parts: Sequence[BenchPart], part: BenchPart, sides: Sequence[str], time_block: Callable[[str], T]
) -> list[dict[str, T]]:
    """In a worker: for each round of the part a block of every side, interleaved. Prints its progress. Collective."""
    before, total = part.rounds * parts.index(part), part.rounds * len(parts)
    rounds = []
    for number in range(part.rounds):
        rounds.append({name: time_block(name) for name in order(sides, number)})
        print(RoundsDone(before + number + 1, total).written(), flush=True)
    return rounds


def locate(parts: Sequence[BenchPart], done: int) -> tuple[BenchPart, RoundsDone]:
    """The part that rounds counted over all parts have reached, and the rounds of that part alone."""
    rounds = parts[0].rounds
    number = max(0, done - 1) // rounds
    return parts[number], RoundsDone(done - number * rounds, rounds)


# -- shown ------------------------------------------------------------------------------------------------------


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
    """Yields the function that shows on `console` how far the parts are: by a bar on a terminal; elsewhere by a line
    for each named activity, and for the end of a part."""
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
