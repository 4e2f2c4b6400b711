"""Records the noise of a run, one line for each measurement: `noise.jsonl` in the run folder.

Note [The record of noise]
A line is one JSON object: the measurement and what follows from it. The newest whole line is the valid one: a resumed
run records steps a second time, and a worker that is killed while it writes leaves half a line. Such a half is ended
before the next line, so that it spoils no other. JSON has no infinity: what is not finite is null. A `high` of null
means that there is no upper end; null anywhere else makes a line unusable.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lockstep.events import Event, NoiseMeasured
from lockstep.observe.json_lines import append_line
from lockstep.optim.noise import Noise

FILE = "noise.jsonl"
OPTIMIZERS = ("sgd", "adam", "")


class Recorder:
    """Appends every measurement of noise to the record in `folder`, on the worker that `speaks` now.

    Where that fails, `say` is called once, nothing is recorded any more, and training goes on.
    """

    def __init__(self, folder: Path, speaks: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._path = folder.absolute() / FILE  # the script may change its working folder
        self._speaks, self._say = speaks, say
        self._has_failed = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, NoiseMeasured) and self._speaks() and not self._has_failed:
            self._record(event)

    def _record(self, event: NoiseMeasured) -> None:
        try:
            append_line(self._path, line_of(event))
        except OSError as error:
            self._has_failed = True
            self._say(
                f"the noise of step {event.step} could not be written to {self._path}: {error.strerror}. It is not "
                "recorded any more; training goes on. Make room and start the run again to record on"
            )


def line_of(event: NoiseMeasured) -> str:
    """The measurement as a line of the record, without its end. See Note [The record of noise]."""
    entries = {
        "step": event.step,
        "lanes": event.num_lanes,
        "optimizer": event.optimizer,
        "plain": _as_json(event.plain),
        "preconditioned": None if event.preconditioned is None else _as_json(event.preconditioned),
    }
    return json.dumps(entries, allow_nan=False)


def event_of(line: str | bytes) -> NoiseMeasured:
    """The measurement in a line of the record; raises ValueError if there is none."""
    entries = _object(json.loads(line, parse_float=_finite, parse_constant=_finite))
    if entries.get("optimizer") not in OPTIMIZERS:
        raise ValueError(f"no optimizer is called {entries.get('optimizer')!r}")
    other = entries.get("preconditioned")
    return NoiseMeasured(
        step=_whole(entries.get("step")),
        num_lanes=_whole(entries.get("lanes"), least=1),
        optimizer=entries["optimizer"],
        plain=_noise(entries.get("plain"), preconditioned=False),
        preconditioned=None if other is None else _noise(other, preconditioned=True),
    )


def _as_json(noise: Noise) -> dict[str, Any]:
    values = {**asdict(noise), "critical_batch": noise.critical_batch, "sure": noise.sure}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _noise(entry: object, *, preconditioned: bool) -> Noise:
    values = _object(entry)
    if values.get("preconditioned") is not preconditioned:
        raise ValueError("one kind of noise stands in the place of the other")
    ends = {name: math.inf for name in ("low", "high") if values.get(name, 0) is None}
    values = {**values, **ends}
    return Noise(**{field.name: _READ[field.type](values.get(field.name)) for field in fields(Noise)})


def _object(entry: object) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"{entry!r} is no JSON object")
    return entry


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits} is not finite")
    return value


def _whole(value: object, least: int = -1) -> int:
    """The step is -1 before anything was measured."""
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is no whole number of {least} or more")
    return value


def _number(value: object) -> float:
    """Infinity comes only from a null: the record's own numbers are finite."""
    if type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if type(value) is not float or math.isnan(value):
        raise ValueError(f"{value!r} is no number")
    return value


_READ: dict[Any, Callable[[object], Any]] = {int: _whole, float: _number, bool: bool}
