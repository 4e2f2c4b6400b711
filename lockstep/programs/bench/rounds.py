"""Rounds: in which order sides are timed, how far that is, and how it is shown. Without torch."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

_MARK = b"bench-progress "

T = TypeVar("T")


@dataclass(frozen=True)
class RoundsDone:
    """Rounds done, of how many, of what has this title; `doing` is the present activity, where that is not a round."""

    title: str
    done: int
    total: int
    doing: str = ""


Follow = Callable[[RoundsDone], None]


def order(sides: Sequence[str], round_number: int) -> tuple[str, ...]:
    """The sides in the order of one round.

    In as many rounds as there are sides every side is once in every position; the next ones run backwards, so that a
    side follows another as often as that follows it.
    """
    shift = round_number % len(sides)
    turned = (*sides[shift:], *sides[:shift])
    return turned[::-1] if round_number // len(sides) % 2 else turned


def timed_rounds(
    title: str, num_rounds: int, sides: Sequence[str], time_block: Callable[[str], T]
) -> list[dict[str, T]]:
    """In a worker: for each round a block of every side, interleaved. Prints its progress. Collective."""
    rounds = []
    for number in range(num_rounds):
        rounds.append({name: time_block(name) for name in order(sides, number)})
        print(_MARK.decode() + json.dumps(astuple(RoundsDone(title, number + 1, num_rounds))), flush=True)
    return rounds


class RoundLines:
    """Takes worker 0's output as it comes and passes on the progress in it."""

    def __init__(self, follow: Follow) -> None:
        self._follow, self._rest = follow, b""

    def __call__(self, output: bytes) -> None:
        *lines, self._rest = (self._rest + output).split(b"\n")
        for line in lines:
            if line.startswith(_MARK):
                self._follow(RoundsDone(*json.loads(line.removeprefix(_MARK))))


@contextmanager
def show_progress(console: "Console", num_rounds: int) -> Iterator[Follow]:
    """Yields the function that shows on `console` what is done of all rounds: by a bar on a terminal; elsewhere by a
    line for each named activity, and for the last round of each title."""
    from rich.markup import escape  # takes longer to import than help may
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    def print_line(now: RoundsDone) -> None:
        if now.doing or now.done == now.total:
            console.print(f"{now.title}: {now.doing or 'done'}", markup=False, highlight=False, soft_wrap=True)

    if not console.is_terminal:
        yield print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task, done = bar.add_task("starting", total=num_rounds), dict[str, int]()

        def move_bar(now: RoundsDone) -> None:
            done[now.title] = now.done
            title = f"{now.title}: {now.doing}" if now.doing else now.title
            bar.update(task, description=escape(title), completed=sum(done.values()))

        yield move_bar
