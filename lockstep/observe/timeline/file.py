"""The timeline of a run on disk: parts in, one trace out."""

import json
import os
from pathlib import Path

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.observe.journal import read_journal
from lockstep.observe.timeline.part import FOLDER, Part, read_parts
from lockstep.observe.timeline.trace import LauncherMark, make_trace

FILE = "timeline.json"

_MARKS = {
    "WorkerStarted": "worker {worker} started",
    "WorkerExited": "worker {worker} ended ({status})",
    "MemberLost": "worker {worker} lost",
    "RunScaled": "scaled to {num_wanted} workers",
    "RunRestarted": "all start again",
    "SlowFound": "worker {worker} is slow",
    "CatchUpFound": "worker {worker} has caught up",
    "LateFound": "step {step} is late",
    "LaunchEnded": "launch ended ({exit_code})",
}
"""Which entries of the journal are marks of the trace, and their names."""


def has_timeline(folder: Path) -> bool:
    """Whether a worker has written a part of a timeline there."""
    return any((folder / FOLDER).glob("worker-*.jsonl"))


def parts_of(folder: Path) -> tuple[Part, ...]:
    """The parts of the run in `folder`; raises in a sentence if there are none."""
    if not folder.is_dir():
        raise BadArgument(f"there is no run in {folder}: name the folder that holds its logs, such as runs/train-1")
    parts = read_parts(folder)
    if not parts:
        raise BadArgument(
            f"the run in {folder} has no timeline: start it with `lockstep run --timeline`, or write "
            "run.timeline(steps=20) in the script"
        )
    return parts


def trace_text(folder: Path) -> str:
    """The trace of the run in `folder` as it is now, as JSON."""
    return json.dumps(make_trace(parts_of(folder), launcher_marks(folder)), allow_nan=False)


def write_trace(folder: Path, out: Path | None = None) -> Path:
    """Writes the trace of the run in `folder`, to `timeline.json` there unless `out` names a file; whole or not."""
    path, text = out or folder / FILE, trace_text(folder)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise BadEnvironment(f"the timeline cannot be written to {path}: {error.strerror}") from error
    return path


def launcher_marks(folder: Path) -> list[LauncherMark]:
    """What of the launcher's journal belongs to the trace."""
    found = []
    for entry in read_journal(folder):
        form = _MARKS.get(entry["kind"])
        if form is not None:
            name = form.format_map({"status": "", "num_wanted": "", "exit_code": "", **entry})
            found.append(LauncherMark(name, int(entry["worker"]), int(entry["step"]), float(entry["at"])))
    return found
