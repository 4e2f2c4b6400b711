"""Rounds: in which order sides are timed, how far that is, and how it is shown. Without torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

_MARK = b"bench-progress "

T = TypeVar("T")


@dataclass(frozen=True)
class RoundsDone:
    """Rounds done, of how many; `doing` is the present activity, where that is not a round."""

    done: int
    total: int
    doing: str = ""


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
        print(f"{_MARK.decode()}{before + number + 1} {total}", flush=True)
    return rounds


class RoundLines:
    """Takes worker 0's output as it comes and passes on the progress in it."""

    def __init__(self, follow: Callable[[RoundsDone], None]) -> None:
        self._follow, self._rest = follow, b""

    def __call__(self, output: bytes) -> None:
        *lines, self._rest = (self._rest + output).split(b"\n")
        for line in lines:
            if line.startswith(_MARK):
                done, total = map(int, line.removeprefix(_MARK).split())
                self._follow(RoundsDone(done, total))


def locate(parts: Sequence[BenchPart], done: int) -> tuple[BenchPart, RoundsDone]:
    """The part that rounds counted over all parts have reached, and the rounds of that part alone."""
    rounds = parts[0].rounds
    number = max(0, done - 1) // rounds
    return parts[number], RoundsDone(done - number * rounds, rounds)


@contextmanager
def show_progress(console: "Console", parts: Sequence[BenchPart]) -> Iterator[Follow]:
    """Yields the function that shows on `console` how far the parts are: by a bar on a terminal; elsewhere by a line
    for each named activity, and for the end of a part."""
    from rich.markup import escape  # takes longer to import than help may
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    def print_line(part: BenchPart, progress: RoundsDone) -> None:
        if progress.doing or progress.done == progress.total:
            line = f"{part.title}: {progress.doing or 'done'}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    if not console.is_terminal:
        yield print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=sum(part.rounds for part in parts))

        def move_bar(part: BenchPart, progress: RoundsDone) -> None:
            before = sum(earlier.rounds for earlier in parts[: parts.index(part)])
            title = f"{part.title}: {progress.doing}" if progress.doing else part.title
            bar.update(task, description=escape(title), completed=before + progress.done)

        yield move_bar
