"""Runs of several tests, started together: each takes seconds of starting and little of the GPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

AT_A_TIME = 6
"""A process that waits for its GPU keeps a core busy: more at a time take longer together."""

Wanted = tuple[str, ...]
Outcome = Callable[[Wanted], Any]


class Together:
    """The runs that the tests of one `file` want. `launch` makes one, in a folder that is not there yet."""

    everyone: "list[Together]" = []  # noqa: RUF012 - the files whose tests were collected

    def __init__(self, launch: Callable[[Wanted, Path], Any], file: str) -> None:
        self.launch, self.file = launch, Path(file)
        self._wanted: dict[Wanted, None] = {}
        self._always: set[Wanted] = set()
        Together.everyone.append(self)

    def run(self, *words: object) -> Wanted:
        """Words for a run, which is made with all others if a test that was chosen has it among its parameters."""
        wanted = tuple(map(str, words))
        self._wanted[wanted] = None
        return wanted

    def always(self, wanted: Wanted) -> Wanted:
        """A run that is made if any test of the file was chosen: others are held against it."""
        self._always.add(wanted)
        return wanted

    def chosen(self, items: Sequence[pytest.Item]) -> list[Wanted]:
        """What the tests that were chosen want, in the order in which it was named."""
        own = [item for item in items if item.path == self.file]
        words = {value for item in own if hasattr(item, "callspec") for value in item.callspec.params.values()}
        return [wanted for wanted in self._wanted if own and wanted in words | self._always]

    def outcomes(self, pool: "RunPool") -> Outcome:
        """What a run came to, once it has ended; one that failed fails where it is asked for."""
        pool.start(self)
        return lambda wanted: pool.futures[self.file, wanted].result()


class RunPool:
    """The runs of all files, a few at a time, in the background of the tests. Its owner closes it."""

    def __init__(self, items: Sequence[pytest.Item], folder: Path) -> None:
        self._items, self._folder = items, folder
        self._threads = ThreadPoolExecutor(AT_A_TIME)
        self.futures: dict[tuple[Path, Wanted], Future[Any]] = {}

    def start(self, file: Together) -> None:
        """The runs of a file are to be made, unless they are already."""
        for wanted in file.chosen(self._items):
            if (file.file, wanted) not in self.futures:
                own = self._folder / str(len(self.futures))
                self.futures[file.file, wanted] = self._threads.submit(file.launch, wanted, own)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
