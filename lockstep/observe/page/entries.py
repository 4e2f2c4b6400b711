"""What a run's folder says, file by file, as it is now."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import BadArgument
from lockstep.launch.scale import find_launcher
from lockstep.observe.finish import FILE as FINISH_FILE
from lockstep.observe.history import STEPS_FILE, WORKERS_FILE
from lockstep.observe.journal import FILE as JOURNAL_FILE
from lockstep.observe.journal import read_journal
from lockstep.observe.json_lines import read_lines
from lockstep.observe.timeline.file import has_timeline

METRICS_FILE = "metrics.jsonl"
NOISE_FILE = "noise.jsonl"
FILES = (JOURNAL_FILE, STEPS_FILE, WORKERS_FILE, METRICS_FILE, NOISE_FILE, FINISH_FILE, "launcher.json")
"""Those that a view is made of."""

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class RunEntries:
    """The lines of a run's files."""

    name: str
    journal: Sequence[Entry] = ()
    history: Sequence[Entry] = ()
    workers: Sequence[Entry] = ()
    metrics: Sequence[Entry] = ()
    noise: Sequence[Entry] = ()
    has_finished: bool = False
    is_running: bool = False
    log_slots: tuple[int, ...] = ()
    has_timeline: bool = False


def check_folder(folder: Path) -> None:
    """Raises in a sentence unless the folder is that of a run."""
    if not folder.is_dir():
        raise BadArgument(f"there is no run in {folder}: name the folder that holds its logs, such as runs/train-1")
    if not any((folder / name).exists() for name in FILES):
        raise BadArgument(
            f"{folder} is not the folder of a run: it has none of {JOURNAL_FILE}, {STEPS_FILE} and {NOISE_FILE}. Name "
            "the folder that `lockstep run` has made, such as runs/train-1"
        )


def read_entries(folder: Path) -> RunEntries:
    """The run in the folder, as it is now. What is not there, or cannot be read, is left out."""
    return RunEntries(
        name=folder.resolve().name,
        journal=read_journal(folder),
        history=[entry for entry in read_lines(folder / STEPS_FILE) if _has_time_and_step(entry)],
        workers=[entry for entry in read_lines(folder / WORKERS_FILE) if _has_time_and_step(entry)],
        metrics=[entry for entry in read_lines(folder / METRICS_FILE) if is_number(entry.get("step"))],
        noise=[entry for entry in read_lines(folder / NOISE_FILE) if is_number(entry.get("step"))],
        has_finished=(folder / FINISH_FILE).exists(),
        is_running=find_launcher(folder) is not None,
        log_slots=log_slots(folder),
        has_timeline=has_timeline(folder),
    )


def signature(folder: Path) -> tuple[Any, ...]:
    """Changes whenever the view of the run would."""
    stats = []
    for name in FILES:
        try:
            found = os.stat(folder / name)
            stats.append((name, found.st_size, found.st_mtime_ns))
        except OSError:
            stats.append((name, 0, 0))
    return (*stats, find_launcher(folder) is not None, log_slots(folder), has_timeline(folder))


def log_slots(folder: Path) -> tuple[int, ...]:
    """The workers that have logs."""
    stems = [path.stem.removeprefix("worker-") for path in folder.glob("worker-*.log")]
    return tuple(sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit()))


def is_number(value: Any) -> bool:
    """Whether it is a number that a chart can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


def _has_time_and_step(entry: Entry) -> bool:
    return is_number(entry.get("at")) and is_number(entry.get("step"))
