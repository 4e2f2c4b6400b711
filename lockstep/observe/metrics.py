"""What a script logs by `run.log`: written once for every committed step, by whichever worker is the first then.

# Note [Metrics are written once]
# Every worker calls run.log, outside of lanes, with the same values; the first worker writes them at once: a line of
# `metrics.jsonl` in the run's folder, then the sinks. The others keep the calls of the present step. Where the first
# worker is lost, nobody knows which of these it has written, so the next one reads the end of the file: calls are
# counted, the last step in the file has so many lines, and what comes before that is there. So no call is in the file
# twice, and none is missing. A sink cannot be read: it is written after the file, and a worker that is killed between
# the two leaves that one call to the file alone. Without a folder, calls that the lost worker may have written are
# left out.

# Note [Metrics of a resumed run]
# A run that goes on from step r trains r + 1 and what follows again. Their lines are cut off before its first step, and
# of r itself those that were logged after the checkpoint: it has how many there were. A run that begins anew begins
# with an empty file. A worker that joins cuts nothing off. What a script logs before it has come to the place where it
# goes on, at its top or at the head of an epoch, was logged before, and is left out.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from lockstep.errors import BadArgument
from lockstep.events import Closed, Copied, Event, Events, GenerationFormed, StepBegan
from lockstep.observe.json_lines import append_line, newest_first
from lockstep.observe.sinks import MetricsSink
from lockstep.state.run_state import StepState

FILE = "metrics.jsonl"


class LoggingWorker(Protocol):
    """What the log needs to know of its worker."""

    @property
    def is_first(self) -> bool:
        """Whether it is the present first one."""

    @property
    def is_present(self) -> bool:
        """Whether its script stands where those of the others do: not so for a newcomer before its first batch."""

    @property
    def is_member(self) -> bool:
        """Whether it is one of the run's workers; a newcomer is none before it is admitted."""


@dataclass(frozen=True, order=True)
class Written:
    """How far the file goes: the last step in it, and how many lines that step has."""

    step: int = -1
    num_calls: int = 0

    def has(self, step: int, number: int) -> bool:
        """Whether the call with this number in this step is in the file."""
        return (step, number) < (self.step, self.num_calls)


class MetricsLog:
    """The metrics of one run on one worker. A reader of events, too: it subscribes to those that it needs.

    `folder` is the run's; None where it has none. See Note [Metrics are written once].
    """

    def __init__(self, folder: Path | None, worker: LoggingWorker, events: Events, steps: StepState) -> None:
        self._path = None if folder is None else folder.absolute() / FILE  # the script may change its working folder
        self._worker, self._say, self._steps = worker, events.note, steps
        self._sinks: list[MetricsSink] = []
        self._inherited: list[MetricsSink] = []
        self._step, self._first, self._calls = -1, 0, list[dict[str, float]]()
        """Those of the present step, and the number of the first of them."""
        self._cuts_off = worker.is_member
        self._base: Written | None = None
        """How far the file went where this process began to log or to train."""
        self._written: Written | None = None
        """None while another worker writes."""
        events.subscribe(self._on_change, GenerationFormed, Copied, Closed)
        if self._path is not None:
            events.subscribe(self._on_step, StepBegan)

    def add(self, sink: Any) -> None:
        """From now on values go there too."""
        self._sinks.append(MetricsSink(sink, self._say))

    def log(self, step: int, values: Mapping[str, Any], *, is_again: bool = False) -> None:
        """What the script logs after `step` steps: written here and now on the first worker, kept on the others.

        `is_again`: the script was resumed, and has not come to the place where it goes on.
        """
        checked = checked_values(values)
        if is_again or not self._worker.is_present:
            return  # a newcomer on its way: the others have logged that
        number = self._steps.num_logged
        self._begin(step)
        if step != self._step:
            self._step, self._first, self._calls = step, number, []
        self._calls.append(checked)
        self._steps.num_logged += 1
        if self._worker.is_first:
            self._take_up()
            self._write(number)

    def _on_step(self, event: Event) -> None:
        if self._base is None:
            self._begin(event.step)

    def _on_change(self, event: Event) -> None:
        if isinstance(event, Copied):
            # What the original has opened must neither be used nor be closed by this process.
            self._inherited, self._sinks = self._sinks, [sink.forked() for sink in self._sinks]
            self._written = None
        elif isinstance(event, Closed):
            for sink in self._sinks:
                sink.close()
        elif not self._worker.is_first:
            self._written = None
        elif self._written is None:
            self._cut_off(event.step)
            self._take_up()
            for number in range(len(self._calls)):
                self._write(self._first + number, is_certain=False)

    # -- the file -------------------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        """The run's first step, or call, in this process. See Note [Metrics of a resumed run]."""
        if self._base is None:
            self._base = Written(step, self._steps.num_logged)
            if self._worker.is_first:
                self._cut_off(step)

    def _cut_off(self, step: int) -> None:
        base = self._base
        if self._path is not None and self._cuts_off and base is not None and step == base.step:
            self._attempt(lambda path: cut_off(path, base), f"what comes after step {step} cannot be cut off")

    def _take_up(self) -> None:
        """This worker is the first one from now on: it learns what is in the file."""
        if self._written is None:
            self._written = Written()
            self._attempt(self._read, "it cannot be read")

    def _read(self, path: Path) -> None:
        self._written = end_of(path)

    def _write(self, number: int, is_certain: bool = True) -> None:
        """`is_certain`: nobody else can have written the call, unless the file says so."""
        assert self._written is not None
        if self._written.has(self._step, number) or (self._path is None and not is_certain):
            return
        values = self._calls[number - self._first]
        line = line_of(self._step, values)
        self._attempt(lambda path: append_line(path, line), f"the metrics of step {self._step} could not be written")
        for sink in self._sinks:
            sink.write(values, self._step)

    def _attempt(self, work: Callable[[Path], None], failed: str) -> None:
        """Does something with the file. Where that fails it is reported once, and there is no file any more."""
        if self._path is None:
            return
        try:
            work(self._path)
        except OSError as error:
            path, self._path = self._path, None
            self._say(
                f"{path}: {failed}: {error.strerror}. Metrics are not recorded there any more; training goes on. Make "
                "room and start the run again to record on"
            )


def checked_values(values: Mapping[str, Any]) -> dict[str, float]:
    """The values as numbers; raises if there is one that is none. Alike on every worker."""
    if not isinstance(values, Mapping):
        raise BadArgument(
            f'run.log takes a dict of names and numbers, {{"loss": run.loss}}, not {type(values).__name__}'
        )
    return {_checked_name(name): _number(name, value) for name, value in values.items()}


def line_of(step: int, values: Mapping[str, float]) -> str:
    """A line of the file, without its end. JSON has no infinity: what is not finite is null."""
    shown = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return json.dumps({"step": step, **shown}, allow_nan=False)


def end_of(path: Path) -> Written:
    """How far the file goes."""
    last, count = -1, 0
    for _, entry in newest_first(path):
        step = entry.get("step")
        if count and step != last:
            break
        if isinstance(step, int):
            last, count = step, count + 1
    return Written(last, count)


def cut_off(path: Path, base: Written) -> None:
    """Leaves so much in the file."""
    kept, ends = 0, list[int]()
    for place, entry in newest_first(path):
        step = entry.get("step")
        if isinstance(step, int) and step < base.step:
            kept = place + 1
            break
        if step == base.step:
            ends.append(place + 1)
    kept = [kept, *reversed(ends)][: base.num_calls + 1][-1]
    if path.is_file() and not path.is_symlink() and kept < path.stat().st_size:
        os.truncate(path, kept)


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name or name == "step":
        raise BadArgument(
            f'run.log takes names that are not empty and not "step", which it writes itself, not {name!r}'
        )
    return name


def _number(name: str, value: Any) -> float:
    if value is None:
        raise BadArgument(
            f"run.log was given no value for {name!r}. If it is run.loss: write run.backward(loss) in the lanes, which "
            "records it, and log after the first step"
        )
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_complex()):
        raise BadArgument(f"run.log takes numbers, and {name!r} is a tensor {list(value.shape)}: log its mean, say")
    if isinstance(value, str | bytes):
        raise BadArgument(f"run.log takes numbers, and {name!r} is {value!r:.60}")
    if isinstance(value, int):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise BadArgument(f"run.log takes numbers, and {name!r} is a {type(value).__name__}") from error
