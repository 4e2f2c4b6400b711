"""Lines on the screen: what the run is, and what the user should know once."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from lockstep.events import Closed, Event, GenerationFormed, NoiseMeasured, Note, Started
from lockstep.observe.noise_lines import NoiseLines
from lockstep.version import VERSION

SHOWN = (Started, Note, NoiseMeasured, GenerationFormed, Closed)
"""The kinds of events that are worth a line."""

NOISE_LOG = logging.getLogger("lockstep.noise")


class Console:
    """Writes the start line and notices to a stream, on the worker that `speaks` now.

    `launcher_reports`: the launcher reports lost workers, and knows more about why. `run_dir` is where the noise is
    recorded. A run that `has_failed` gets no advice at its end. The launcher shows the output of the first worker
    alone: a line of another one goes to it by `pass_on`.
    """

    def __init__(
        self,
        stream: TextIO,
        speaks: Callable[[], bool] = lambda: True,
        *,
        launcher_reports: bool = False,
        run_dir: Path | None = None,
        has_failed: Callable[[], bool] = lambda: False,
        pass_on: Callable[[str], None] | None = None,
    ) -> None:
        self._stream, self._speaks, self._launcher_reports, self._pass_on = stream, speaks, launcher_reports, pass_on
        self._noise, self._has_failed = NoiseLines(run_dir), has_failed

    def __call__(self, event: Event) -> None:
        noise = self._noise.lines(event)  # on every worker: the next one that writes must know what was shown
        if not self._speaks_of(event):
            return
        match event:
            case GenerationFormed():
                lines = changes(event, reported_by_launcher=self._launcher_reports)
                if self._pass_on is None or event.worker == event.slots[0]:
                    self._write(*lines)
                else:
                    for line in lines:
                        self._pass_on(line)
            case Started():
                wire = [f"  wire: {event.wire}"] if event.wire else []
                self._write(start_line(event), *wire, *(f"  note: {note}" for note in event.notes))
            case Note(text):
                self._write(f"  note: {text}")
            case NoiseMeasured():
                NOISE_LOG.info(self._noise.words)
                self._write(*noise)
            case Closed() if not self._has_failed():
                self._write(*noise)

    def _speaks_of(self, event: Event) -> bool:
        """Of a change of members the first of those speaks who were there before it: a newcomer may be the first now,
        and its script is not where the others' are yet."""
        match event:
            case Note(one_worker=True):
                return True
            case GenerationFormed():
                return event.worker == next(slot for slot in event.slots if slot not in event.joined)
        return self._speaks()

    def _write(self, *lines: str) -> None:
        for line in lines:
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


def changes(event: GenerationFormed, *, reported_by_launcher: bool) -> list[str]:
    """Lines about workers that joined, left or were lost."""
    lines = []
    if event.lost:
        because = f" ({event.cause})" if event.cause else ""
        if not reported_by_launcher:
            lines.append(f"! {_workers(event.lost)} lost at step {event.step}{because}")
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
    if event.in_update:
        return f"the update before step {event.step} was completed by the others"
    if event.committed:
        return f"step {event.step} was complete everywhere and counts"
    return f"step {event.step} was not applied and is computed again"


def _moved(event: GenerationFormed) -> str:
    if not event.moved_lanes:
        return ""
    verb = "moves" if len(event.moved_lanes) == 1 else "move"
    return f"{_listed('lane', event.moved_lanes)} {verb} to {_listed('worker', event.moved_to)}; "


def _workers(slots: tuple[int, ...]) -> str:
    return f"{_listed('worker', slots)} {'is' if len(slots) == 1 else 'are'}"


def _listed(word: str, numbers: tuple[int, ...]) -> str:
    """`lanes 0, 1 and 4`"""
    return f"{word}{'' if len(numbers) == 1 else 's'} " + " and ".join(", ".join(map(str, numbers)).rsplit(", ", 1))


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
