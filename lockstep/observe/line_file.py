"""Files of a run's folder that grow by lines: JSON objects, written by one process, read by any while they grow."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.observe.json_lines import append_line


class LineFile:
    """Appends JSON objects to a file, each as one line. Links are not followed.

    Where that fails, `say` is called once, nothing is written any more, and the run goes on. `what` names what the
    file holds, for that sentence.
    """

    def __init__(self, path: Path, what: str, say: Callable[[str], None]) -> None:
        self._path = path.absolute()  # the script may change its working folder
        self._what, self._say = what, say
        self._has_failed = False

    def append(self, entry: Mapping[str, Any]) -> None:
        if self._has_failed:
            return
        try:
            append_line(self._path, json.dumps(entry, allow_nan=False))
        except OSError as error:
            self._has_failed = True
            self._say(
                f"{self._what} cannot be written to {self._path}: {error.strerror}. It is not recorded any more; "
                "training goes on. Make room and start the run again to record on"
            )


def only_first(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say` for the first text, nothing for those that follow: files of one folder share one disk."""
    said: list[str] = []

    def say_first(text: str) -> None:
        if not said:
            said.append(text)
            say(text)

    return say_first


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in the file, in their order; lines that are none are left out, and so is a file that is not there."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = (_parsed(line) for line in lines)
    return [entry for entry in found if isinstance(entry, dict)]


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
