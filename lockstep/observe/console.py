"""Lines on the screen: what the run is, and what the user should know once."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from lockstep.events import Closed, Event, GenerationFormed, NoiseMeasured, Note, Started
from lockstep.observe.noise_lines import NoiseLines
from lockstep.version import VERSION

TOLD = (Started, Note, NoiseMeasured, GenerationFormed, Closed)
"""The kinds of events that are worth a line."""

NOISE_LOG = logging.getLogger("lockstep.noise")


class Console:
    """Writes the start line and notices to a stream, on the worker that `speaks` now.

    `launcher_tells`: somebody else tells of workers that were lost, who knows more about why. `run_dir` is where the
    noise is recorded. A run that `has_failed` gets no advice at its end: there is something else to read.
    """

    def __init__(
        self,
        stream: TextIO,
        speaks: Callable[[], bool] = lambda: True,
        *,
        launcher_tells: bool = False,
        run_dir: Path | None = None,
        has_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stream, self._speaks, self._launcher_tells = stream, speaks, launcher_tells
        self._noise, self._has_failed = NoiseLines(run_dir), has_failed

    def __call__(self, event: Event) -> None:
        noise = self._noise.worth(event)  # asked on every worker: who speaks next must know what was told
        if not self._speaks() and not (isinstance(event, Note) and event.one_worker):
            return
        match event:
            case GenerationFormed():
                for line in changes(event, told_by_launcher=self._launcher_tells):
                    self._write(line)
            case Started():
                self._write(start_line(event))
                if event.wire:
                    self._write(f"  wire: {event.wire}")
                for note in event.notes:
                    self._write(f"  note: {note}")
            case Note(text):
                self._write(f"  note: {text}")
            case NoiseMeasured():
                NOISE_LOG.info(self._noise.words)
                self._write_all(noise)
            case Closed() if not self._has_failed():
                self._write_all(noise)

    def _write_all(self, lines: list[str]) -> None:
        for line in lines:
            self._write(line)

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def start_line(event: Started) -> str:
    """`lockstep 0.1 · train.py · 4 workers · 8 lanes · 1 thread each · seed 7 · exact`; and the GPU, if it is one."""
    parts = [
        f"lockstep {VERSION}",
        event.script,
        _count(event.num_workers, "worker"),
        _count(event.num_lanes, "lane"),
        _count(event.threads, "thread") + " each",
        f"seed {event.seed}",
        "exact" if event.exact else "not exact",
        *([event.device] if event.device else []),
    ]
    return " · ".join(parts)


def changes(event: GenerationFormed, *, told_by_launcher: bool) -> list[str]:
    """What the user should know of workers that came and went."""
    lines = []
    if event.lost:
        if not told_by_launcher:
            lines.append(f"! {_workers(event.lost)} lost at step {event.step}{_because(event.cause)}")
        lines.append(f"  {_step_in_words(event)}; {_moved(event)}going on in {event.took_s:.1f} s")
    now = f"{_count(len(event.slots), 'worker')} now"
    if event.left:
        lines.append(f"- {_workers(event.left)} gone before step {event.step}: {now}")
    if event.joined:
        lines.append(f"+ {_workers(event.joined)} new at step {event.step}: {now}")
    return lines


def _step_in_words(event: GenerationFormed) -> str:
    if not event.cause:
        return f"no step was under way before step {event.step}"
    if event.committed:
        return f"step {event.step} was complete everywhere and counts"
    return f"step {event.step} was not applied and is computed again"


def _moved(event: GenerationFormed) -> str:
    if not event.moved_lanes:
        return ""
    lanes = f"lane{'' if len(event.moved_lanes) == 1 else 's'} {_listed(event.moved_lanes)}"
    return f"{lanes} {'moves' if len(event.moved_lanes) == 1 else 'move'} to {_carriers(event.moved_to)}; "


def _carriers(slots: tuple[int, ...]) -> str:
    return f"worker{'' if len(slots) == 1 else 's'} {_listed(slots)}"


def _workers(slots: tuple[int, ...]) -> str:
    return f"{_carriers(slots)} {'is' if len(slots) == 1 else 'are'}"


def _listed(numbers: tuple[int, ...]) -> str:
    return " and ".join(", ".join(map(str, numbers)).rsplit(", ", 1))


def _because(cause: str) -> str:
    return f" ({cause})" if cause else ""


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
