"""The journal of a launch: what the launcher did and saw, one line for each event, `events.jsonl` in the run's folder.

A line is a JSON object: `at` (the time of day) and `time_s` (the host's monotonic clock), `kind`, `worker`, `step`, the
event's plain fields, and `text`, the message that the launcher has shown, if it has.
"""

import math
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from lockstep.events import Event
from lockstep.launch.events import WorkersSeen
from lockstep.launch.supervision.messages import message
from lockstep.observe.json_lines import LineFile, read_lines

FILE = "events.jsonl"
_STAMP = {field.name for field in fields(Event)}


class Journal:
    """A reader of the launcher's events. `say` is called once if the journal cannot be written."""

    def __init__(self, folder: Path, say: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._file, self._clock = LineFile(folder / FILE, "the journal of the launch", say), clock

    def __call__(self, event: Event) -> None:
        if not isinstance(event, WorkersSeen):  # it has a file of its own
            self._file.append(entry_of(event, self._clock()))


def entry_of(event: Event, at: float) -> dict[str, Any]:
    """The event as an object of the journal."""
    plain = {field.name: getattr(event, field.name) for field in fields(event) if field.name not in _STAMP}
    return {
        "at": at,
        "time_s": event.time_s,
        "kind": type(event).__name__,
        "worker": event.worker,
        "step": event.step,
        **{name: value for name, value in plain.items() if _is_plain(value)},
        "text": message(event),
    }


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The entries in the order in which they were written; those without a kind and a time are left out."""
    return [entry for entry in read_lines(folder / FILE) if _is_entry(entry)]


def _is_entry(entry: dict[str, Any]) -> bool:
    numbers = [entry.get(name) for name in ("at", "time_s", "worker", "step")]
    return isinstance(entry.get("kind"), str) and all(map(_is_finite, numbers))


def _is_finite(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, tuple):
        return all(isinstance(one, int) for one in value)
    return isinstance(value, str | int | bool)
