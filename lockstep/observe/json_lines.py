"""Files of a run's folder that grow by lines, each a JSON object: appended to by one process at a time, read by any.

A worker that is killed while it writes leaves half a line. It is ended before the next line, so that it spoils no
other; readers pass over it.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK_BYTES = 1 << 16


def append_line(path: Path, line: str) -> None:
    """Appends the line to the file, and passes it to the system; links are not followed."""
    with os.fdopen(os.open(path, _FLAGS, 0o666), "r+b", buffering=0) as file:
        text = f"{_end_of_half_a_line(file.fileno())}{line}\n".encode()
        while text:  # a write that fills the disk is short; the next one raises the error
            text = text[file.write(text) or 0 :]


def newest_first(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of the file from its end, each with the place where its line ends; none if there is no file."""
    try:
        opened = os.open(path, _READ)
    except FileNotFoundError:
        return
    with os.fdopen(opened, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        rest = b""
        while end > 0:
            begin = max(0, end - _BLOCK_BYTES)
            file.seek(begin)
            text = file.read(end - begin) + rest
            end = begin
            rest, *lines = text.split(b"\n") if begin > 0 else [b"", *text.split(b"\n")]
            place = begin + len(text)
            for line in reversed(lines):
                entry = _object_in(line)
                if entry is not None:
                    yield place, entry
                place -= len(line) + 1


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in the file, in their order; lines that are none are left out, and so is a file that is not there."""
    try:
        with os.fdopen(os.open(path, _READ), "rb") as file:
            found = [_object_in(line) for line in file.read().splitlines()]
    except OSError:
        return []
    return [entry for entry in found if entry is not None]


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


def _object_in(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _end_of_half_a_line(file: int) -> str:
    size = os.fstat(file).st_size
    return "" if size == 0 or os.pread(file, 1, size - 1) == b"\n" else "\n"
