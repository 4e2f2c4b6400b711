"""Finds what is known of the noise of a run, in its folder. See Note [The record of noise] in observe/recorder.py."""

import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.events import NoiseMeasured
from lockstep.observe.noise_lines import RECENT, seen, usual
from lockstep.observe.recorder import FILE, event_of

TAIL_BYTES = 2**18
"""How much of the record's end is read: several times RECENT lines, however long the run."""


@dataclass(frozen=True)
class Known:
    """The newest measurement of a run, and the batch that the run usually has."""

    newest: NoiseMeasured
    batch: float


def find(folder: Path) -> Known:
    """What is known of the run in `folder`, which may be under way; raises if that is no run with a record."""
    try:
        lines = _last_lines(_record_in(folder))
    except OSError as error:
        raise BadEnvironment(f"{folder / FILE} cannot be read: {error.strerror}") from error
    measured = [event for event in map(_measured, lines) if event is not None]
    if not measured:
        raise BadArgument(
            f"{folder / FILE} has no line that can be read: if the run has just begun, ask again after its next "
            f"steps; if not, this lockstep did not write it: move it away and go on with the run"
        )
    return Known(measured[-1], usual(_recent_batches(measured)))


def _record_in(folder: Path) -> Path:
    if not folder.is_dir():
        raise BadArgument(f"there is no run in {folder}: name the folder that holds its logs, such as runs/train-1")
    if not (folder / FILE).is_file():
        raise BadArgument(
            f"no noise was recorded in {folder} (there is no {FILE}): name the folder of one run, such as "
            f"runs/train-1, which `lockstep run` started with two lanes or more, and give it some steps"
        )
    return folder / FILE


def _last_lines(path: Path) -> list[bytes]:
    """The last lines; a first one that is cut off is left away."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")
    return lines[1:] if start else lines


def _measured(line: bytes) -> NoiseMeasured | None:
    try:
        return event_of(line)
    except (ValueError, RecursionError):  # half a line, of a worker that was killed or is writing just now
        return None


def _recent_batches(measured: list[NoiseMeasured]) -> list[float]:
    """Of those measurements that the newest is made of: what an earlier run left in the same folder is not asked."""
    num_asked = min(RECENT, max(1, seen(measured[-1]).count))
    return [seen(event).batch for event in measured[-num_asked:]]
