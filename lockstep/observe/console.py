"""Lines on the screen: what the run is, and what the user should know once."""

from typing import TextIO

from lockstep.events import Event, Said, Started
from lockstep.version import VERSION


class Console:
    """Writes the start line and notices to a stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._write(start_line(event))
                if event.wire:
                    self._write(f"  wire: {event.wire}")
                for note in event.notes:
                    self._write(f"  note: {note}")
            case Said(text):
                self._write(f"  note: {text}")

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def start_line(event: Started) -> str:
    """`lockstep 0.1 · train.py · 4 workers · 8 lanes · 1 thread each · seed 7 · exact`"""
    parts = [
        f"lockstep {VERSION}",
        event.script,
        _count(event.num_workers, "worker"),
        _count(event.num_lanes, "lane"),
        _count(event.threads, "thread") + " each",
        f"seed {event.seed}",
        "exact" if event.exact else "not exact",
    ]
    return " · ".join(parts)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
