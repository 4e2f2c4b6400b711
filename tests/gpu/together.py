"""Runs of several tests, started together: each takes seconds of starting and little of the GPU."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

Wanted = tuple[str, ...]
Outcome = Callable[[Wanted], Any]


class Together:
    """The runs that the tests of one file want. `launch` makes one, in a folder that is not there yet."""

    def __init__(self, launch: Callable[[Wanted, Path], Any], at_a_time: int = 8) -> None:
        self._launch, self._at_a_time = launch, at_a_time
        self._wanted: dict[Wanted, None] = {}
        self._always: set[Wanted] = set()

    def run(self, *words: object) -> Wanted:
        """Words for a run, which is made with all others if a test that was chosen has it among its parameters."""
        wanted = tuple(map(str, words))
        self._wanted[wanted] = None
        return wanted

    def always(self, wanted: Wanted) -> Wanted:
        """A run that is made in any case: others are held against it."""
        self._always.add(wanted)
        return wanted

    def outcomes(self, request: pytest.FixtureRequest, file: str, factory: pytest.TempPathFactory) -> Outcome:
        """What each run came to. All have been made when this returns; one that failed fails where it is asked for."""
        chosen = [item for item in request.session.items if item.path == Path(file) and hasattr(item, "callspec")]
        words = {value for item in chosen for value in item.callspec.params.values() if value in self._wanted}
        wanted = [words_of_a_run for words_of_a_run in self._wanted if words_of_a_run in words | self._always]
        folder = factory.mktemp("runs")
        with ThreadPoolExecutor(self._at_a_time) as pool:
            futures: dict[Wanted, Future[Any]] = {
                words: pool.submit(self._launch, words, folder / str(number)) for number, words in enumerate(wanted)
            }
        return lambda words: futures[words].result()
