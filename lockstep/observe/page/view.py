"""What a run's folder says, as one value for people to look at: numbers over steps and time, and what happened when.

Pure: lines of files in, a view out. The view is plain JSON; pages and the terminal show it.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lockstep.observe.page.entries import Entry, RunEntries, is_number

MOST_POINTS = 600
MOST_HAPPENINGS = 300
MOST_METRICS = 24
PARTS = ("compute", "waiting", "data", "other")
"""Where the time of a step goes. See Note [Where the time goes] in launch/channels/status.py."""

Series = dict[str, list[float | None]]


def make_view(run: RunEntries) -> dict[str, Any]:
    """The view of a run. Times are seconds since its first entry, `began_at` that one's time of day."""
    times = [entry["at"] for entries in (run.journal, run.history, run.workers) for entry in entries]
    began_at, updated_at = min(times, default=0.0), max(times, default=0.0)
    steps = [entry for entry in run.history if "kind" not in entry]
    return {
        "name": run.name,
        **_state(run),
        "began_at": began_at,
        "updated_at": updated_at,
        "now": _now(run, steps),
        "steps": _steps(steps, began_at),
        "parts": _parts(run.workers, began_at),
        "workers": _workers(run.workers, run.history, began_at),
        "noise": _noise(run.noise),
        "metrics": _metrics(run.metrics),
        "marks": _marks(run, began_at),
        "happenings": _happenings(run, began_at),
        "log_slots": list(run.log_slots),
        "has_timeline": run.has_timeline,
    }


# -- what the run is --------------------------------------------------------------------------------------------------


def _state(run: RunEntries) -> dict[str, Any]:
    launches = [entry for entry in run.journal if entry["kind"] in ("LaunchBegan", "LaunchEnded")]
    begins = [entry for entry in launches if entry["kind"] == "LaunchBegan"]
    last = launches[-1] if launches else None
    code = last.get("exit_code") if last is not None and last["kind"] == "LaunchEnded" else None
    if run.is_running:
        state = "running"
    elif run.has_finished:
        state = "finished"
    elif code is not None:
        state = f"ended with exit code {code}"
    else:
        state = "not known: no launcher watches it, or it was killed"
    program = os.path.basename(str(begins[-1].get("program", ""))) if begins else ""
    return {"state": state, "is_running": run.is_running, "program": program}


def _now(run: RunEntries, steps: Sequence[Entry]) -> dict[str, Any]:
    """The newest numbers."""
    newest: Entry = steps[-1] if steps else {}
    lanes = _lanes(run.history[-1]) if run.history else {}
    return {
        "step": newest.get("step"),
        "loss": _number(newest.get("loss")),
        "samples_per_s": _rate(newest),
        "num_workers": len(lanes),
        "num_lanes": sum(lanes.values()),
    }


# -- numbers over steps and time --------------------------------------------------------------------------------------


def _steps(entries: Sequence[Entry], began_at: float) -> Series:
    rows = [
        {
            "step": _number(entry["step"]),
            "t": entry["at"] - began_at,
            "loss": _number(entry.get("loss")),
            "samples_per_s": _rate(entry),
        }
        for entry in without_undone(entries)
    ]
    return _columns(thinned(rows, "loss"), ("step", "t", "loss", "samples_per_s"))


def without_undone(entries: Sequence[Entry]) -> list[Entry]:
    """The entries that count: a run that was resumed made some steps again, and the later one is the valid one."""
    kept: list[Entry] = []
    least = math.inf
    for entry in reversed(entries):
        if entry["step"] < least:
            kept.append(entry)
            least = entry["step"]
    return kept[::-1]


def _parts(entries: Sequence[Entry], began_at: float) -> Series:
    """Seconds of a step by part, on the average of the workers that were there at both ends of an interval."""
    rows = []
    for before, after in pairwise(entries):
        spent = [_spent(before["workers"][slot], now) for slot, now in _both(before, after)]
        found = [one for one in spent if one is not None]
        if found:
            means = {part: sum(one[part] for one in found) / len(found) for part in PARTS}
            rows.append({"step": _number(after["step"]), "t": after["at"] - began_at, **means})
    return _columns(thinned(rows, "compute"), ("step", "t", *PARTS))


def _both(before: Entry, after: Entry) -> list[tuple[str, Entry]]:
    earlier, later = before.get("workers"), after.get("workers")
    if not isinstance(earlier, Mapping) or not isinstance(later, Mapping):
        return []
    return [(slot, row) for slot, row in later.items() if isinstance(row, Mapping) and slot in earlier]


def _spent(before: Entry, after: Entry) -> dict[str, float] | None:
    """What a worker spent by the step; None if it made none, or is another process."""
    names = ("step", "committed_s", "compute_s", "waiting_s", "data_s")
    if not isinstance(before, Mapping) or not all(
        is_number(row.get(name)) for row in (before, after) for name in names
    ):
        return None
    steps, *spent = (after[name] - before[name] for name in names)
    if steps <= 0 or not before["committed_s"] or any(value < 0 for value in spent):
        return None
    committed_s, compute_s, waiting_s, data_s = (value / steps for value in spent)
    other_s = max(0.0, committed_s - compute_s - waiting_s - data_s)
    return {"compute": compute_s, "waiting": waiting_s, "data": data_s, "other": other_s}


def _workers(entries: Sequence[Entry], history: Sequence[Entry], began_at: float) -> dict[str, Any]:
    """Lanes and memory of every worker over time, and what each of them does now."""
    slots = sorted(
        {slot for entry in entries for slot in _rows(entry)} | {s for entry in history for s in _lanes(entry)}
    )
    lanes = [
        {"step": _number(e["step"]), "t": e["at"] - began_at, **{str(s): n for s, n in _lanes(e).items()}}
        for e in history
    ]
    memory = [
        {"step": _number(entry["step"]), "t": entry["at"] - began_at}
        | {str(slot): _number(row.get("memory")) or None for slot, row in _rows(entry).items()}
        | {f"gpu {slot}": _number(row.get("gpu_memory")) or None for slot, row in _rows(entry).items()}
        for entry in entries
    ]
    names = [str(slot) for slot in slots]
    on_gpu = any(value for row in memory for name, value in row.items() if name.startswith("gpu "))
    newest = _rows(entries[-1]) if entries else {}
    return {
        "slots": slots,
        "lanes": _columns(_changes(lanes), ("step", "t", *names)),
        "memory": _columns(_every(memory), ("step", "t", *names, *(f"gpu {name}" for name in names if on_gpu))),
        "now": {
            str(slot): {name: row.get(name) for name in ("phase", "step", "lanes", "memory")}
            for slot, row in newest.items()
        },
    }


def _noise(entries: Sequence[Entry]) -> Series:
    rows = []
    for entry in without_undone(entries):
        noise = entry.get("preconditioned") or entry.get("plain")
        if isinstance(noise, Mapping) and _number(noise.get("critical_batch")) is not None:
            rows.append(
                {
                    "step": _number(entry["step"]),
                    "scale": _number(noise["critical_batch"]),
                    "low": _number(noise.get("low")),
                    "high": _number(noise.get("high")),
                }
            )
    return _columns(_every(rows), ("step", "scale", "low", "high"))


def _metrics(entries: Sequence[Entry]) -> dict[str, Series]:
    """The values that the script has logged, by name."""
    names = dict.fromkeys(name for entry in entries for name, value in entry.items() if _is_metric(name, value))
    found = {}
    for name in list(names)[:MOST_METRICS]:
        valid = without_undone([entry for entry in entries if is_number(entry.get(name))])
        rows = [{"step": _number(entry["step"]), "value": _number(entry[name])} for entry in valid]
        found[name] = _columns(thinned(rows, "value"), ("step", "value"))
    return found


# -- what happened ----------------------------------------------------------------------------------------------------


def _marks(run: RunEntries, began_at: float) -> list[dict[str, Any]]:
    """What is marked on the curves: workers that were lost, have joined or left, and starts of all."""
    marks = []
    for entry in run.history:
        if entry.get("kind") == "GenerationFormed":
            for kind in ("lost", "joined", "left"):
                slots = entry.get(kind)
                if isinstance(slots, list) and slots:
                    marks.append(_mark(entry, began_at, kind, f"{_named(slots)} {_verb(kind, len(slots))}"))
    for entry in run.journal:
        if entry["kind"] == "RunRestarted":
            marks.append(_mark(entry, began_at, "restart", "all workers start again"))
    return sorted(marks, key=lambda mark: float(mark["t"]))[-MOST_HAPPENINGS:]


def _happenings(run: RunEntries, began_at: float) -> list[dict[str, Any]]:
    """What the launcher has said, and what the workers have recorded, in the order of time."""
    found = [_mark(entry, began_at, _kind_of(entry), text) for entry in run.journal if (text := _text_of(entry))]
    for entry in run.history:
        if entry.get("kind") == "CheckpointSaved":
            took = f" in {entry['took_s']:.1f} s" if is_number(entry.get("took_s")) else ""
            found.append(_mark(entry, began_at, "checkpoint", f"checkpoint of step {entry['step']} saved{took}"))
    found += [mark for mark in _marks(run, began_at) if mark["kind"] in ("joined", "left")]
    if not any(entry["kind"] == "MemberLost" for entry in run.journal):
        found += [mark for mark in _marks(run, began_at) if mark["kind"] == "lost"]
    return sorted(found, key=lambda mark: float(mark["t"]))[-MOST_HAPPENINGS:]


def _text_of(entry: Entry) -> str:
    if entry["kind"] == "LaunchBegan":
        return f"launched on {entry.get('num_workers')} workers"
    if entry["kind"] == "LaunchEnded":
        return f"ended with exit code {entry.get('exit_code')}"
    return str(entry.get("text") or "").strip()


def _kind_of(entry: Entry) -> str:
    if entry["kind"] in ("MemberLost", "RunFailed", "JoinerLost", "HangFound", "StoppedFound"):
        return "lost"
    return {"SlowFound": "slow", "LateFound": "slow", "RunRestarted": "restart"}.get(entry["kind"], "note")


def _mark(entry: Entry, began_at: float, kind: str, text: str) -> dict[str, Any]:
    return {"t": entry["at"] - began_at, "step": _number(entry.get("step")), "kind": kind, "text": text}


def _named(slots: Sequence[Any]) -> str:
    return f"worker{'' if len(slots) == 1 else 's'} {', '.join(map(str, slots))}"


def _verb(kind: str, number: int) -> str:
    has = "has" if number == 1 else "have"
    return {"lost": "lost", "joined": f"{has} joined", "left": f"{has} left"}[kind]


# -- values -----------------------------------------------------------------------------------------------------------


def thinned(rows: Sequence[dict[str, Any]], name: str, most: int = MOST_POINTS) -> list[dict[str, Any]]:
    """At most so many of the rows: of each stretch those with the least and the greatest value, so that peaks stay."""
    if len(rows) <= most:
        return list(rows)
    stretches = most // 2 - 1
    kept: list[int] = []
    for number in range(stretches):
        places = range(len(rows) * number // stretches, len(rows) * (number + 1) // stretches)
        known = [place for place in places if rows[place][name] is not None] or list(places)
        kept += {min(known, key=lambda at: _key(rows[at][name])), max(known, key=lambda at: _key(rows[at][name]))}
    return [rows[place] for place in sorted({0, *kept, len(rows) - 1})]


def _every(rows: Sequence[dict[str, Any]], most: int = MOST_POINTS) -> list[dict[str, Any]]:
    """At most so many of the rows, evenly; the last one is there."""
    apart = math.ceil(len(rows) / most)
    return list(rows) if apart <= 1 else list(rows[::-1][::apart][::-1])


def _changes(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows at which something changes but the time, and the one before each, so that lines stay flat between."""
    kept: list[dict[str, Any]] = []
    for place, row in enumerate(rows):
        is_last = place == len(rows) - 1
        if is_last or place == 0 or _without_time(row) != _without_time(rows[place - 1]):
            kept += [rows[place - 1], row] if place and kept[-1] is not rows[place - 1] else [row]
    return _every(kept)


def _without_time(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("step", "t")}


def _columns(rows: Iterable[Mapping[str, Any]], names: Iterable[str]) -> Series:
    listed = list(rows)
    return {name: [row.get(name) for row in listed] for name in names}


def _rows(entry: Entry) -> dict[int, Entry]:
    workers = entry.get("workers")
    if not isinstance(workers, Mapping):
        return {}
    return {int(slot): row for slot, row in workers.items() if slot.isdigit() and isinstance(row, Mapping)}


def _lanes(entry: Entry) -> dict[int, int]:
    lanes = entry.get("lanes")
    if not isinstance(lanes, Mapping):
        return {}
    return {int(slot): int(number) for slot, number in lanes.items() if slot.isdigit() and is_number(number)}


def _rate(entry: Entry) -> float | None:
    samples, seconds = _number(entry.get("samples")), _number(entry.get("seconds"))
    return samples / seconds if samples is not None and seconds else None


def _key(value: Any) -> float:
    return value if value is not None else 0.0


def _number(value: Any) -> float | None:
    """A number that JSON and a chart can hold; None for anything else."""
    return float(value) if is_number(value) and math.isfinite(value) else None


def _is_metric(name: str, value: Any) -> bool:
    return name not in ("step", "at", "time_s") and is_number(value)
