"""The progress of a long piece of work: a moving bar on a terminal, a plain line now and then elsewhere."""

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

REFRESH_S = 0.1
LINES = 10
"""How many lines are printed where there is no terminal."""


class Shown(Protocol):
    """Shows the progress of work with a known number of steps, inside of its context."""

    def at(self, step: int, facts: str) -> None:
        """Shows that `step` steps are done, with a few words about them."""

    def say(self, text: str) -> None:
        """Prints a line of text above the progress."""

    def __enter__(self) -> "Shown": ...

    def __exit__(self, *error: object) -> None: ...


def show_progress(console: Console, title: str, num_steps: int, clock: Callable[[], float] = time.monotonic) -> Shown:
    """A bar if the console is a terminal, lines if not."""
    return (
        ProgressBar(console, title, num_steps, clock)
        if console.is_terminal
        else ProgressLines(console, title, num_steps)
    )


class ProgressBar:
    """Redrawn by the caller's thread at every change, ten times a second at most, and once more at the end."""

    def __init__(
        self, console: Console, title: str, num_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._drawn_s = clock, float("-inf")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[facts]}"), console=console, auto_refresh=False)
        self._task = self._progress.add_task(escape(title), total=num_steps, facts="starting")

    def at(self, step: int, facts: str) -> None:
        self._progress.update(self._task, completed=step, facts=escape(facts))
        if self._clock() - self._drawn_s >= REFRESH_S:
            self._drawn_s = self._clock()
            self._progress.refresh()

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        self._progress.refresh()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


class ProgressLines:
    """The first step, the last and about ten in between, a line each."""

    def __init__(self, console: Console, title: str, num_steps: int) -> None:
        self._console, self._title, self._num_steps = console, title, num_steps
        self._every = max(1, num_steps // LINES)

    def at(self, step: int, facts: str) -> None:
        if step in (1, self._num_steps) or step % self._every == 0:
            self.say(f"{self._title}  step {step:>{len(str(self._num_steps))}}/{self._num_steps}  {facts}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "ProgressLines":
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing."""
