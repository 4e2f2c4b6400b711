"""What it costs to look at a run: the timeline, the history that every run writes, the log, and the page.

    lockstep run -n 2 benchmarks/observe_cost.py mlp
    lockstep run -n 2 benchmarks/observe_cost.py gpt 60

Steps with and without it take turns in the same processes; the ratio of each pair is with ÷ without. Without it, nobody
reads the events. The log is a `run.log` of two numbers after every step. The page is served by a process of its own,
which also asks for it once a second as a browser does; few steps meet such a request, so look at the ratio of the sums.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paired_steps import Switch, Switches, paired, words

import lockstep
from lockstep.events import Event
from lockstep.observe.history import READ, StepHistory
from lockstep.observe.metrics import MetricsLog
from lockstep.observe.timeline.part import PartWriter
from lockstep.programs.bench.report import quantile
from lockstep.programs.models import reference_workload
from lockstep.run.run import Run

PAGE = """
import sys, threading, urllib.request
from pathlib import Path
from lockstep.observe.page.server import PageServer

with PageServer([Path(sys.argv[1])], 0) as server:
    while not threading.Event().wait(1.0):
        urllib.request.urlopen(server.address + "runs.json").read()
"""


@contextmanager
def timeline(run: Run, folder: Path) -> Iterator[Switches]:
    writer = PartWriter(run._events, folder, "cpu", lambda: 1, run._events.note)
    yield Switches(writer.begin, writer.close)


@contextmanager
def history(run: Run, folder: Path) -> Iterator[Switches]:
    reader = StepHistory(folder, lambda: run.is_first, dict, run._events.note)
    yield Switches(lambda: run._events.subscribe(reader, *READ), lambda: run._events.unsubscribe(reader))


@contextmanager
def log(run: Run, folder: Path) -> Iterator[Switches]:
    metrics = MetricsLog(folder, run._formation, run._events)
    yield Switches(nothing, nothing, lambda: metrics.log(run.step, {"loss": run.loss, "rate": 1e-4}))


@contextmanager
def page(run: Run, folder: Path) -> Iterator[Switches]:
    """The first worker starts it; it is stopped for the steps without it."""
    if not run.is_first:
        yield Switches(nothing, nothing)
        return
    reader = StepHistory(folder, lambda: True, dict, run._events.note)
    run._events.subscribe(reader, *READ)
    with subprocess.Popen([sys.executable, "-c", PAGE, str(folder)]) as server:
        yield Switches(lambda: os.kill(server.pid, signal.SIGCONT), lambda: os.kill(server.pid, signal.SIGSTOP))
        server.kill()
    run._events.unsubscribe(reader)


def nothing() -> None:
    pass


def found(run: Run, switch: Switch) -> Switch:
    """Who reads what is looked up once after a change: not in the time of the step."""

    def switched() -> None:
        switch()
        for kind in Event.__subclasses__():
            run._events.has_readers(kind)

    return switched


def main(model: str, pairs: int) -> None:
    for what in (timeline, history, log, page):
        with (
            lockstep.start(seed=0, drift_every=0, recover=False) as run,
            tempfile.TemporaryDirectory() as folder,
            what(run, Path(folder)) as given,
        ):
            switches = Switches(found(run, given.on), found(run, given.off), given.after)
            taken, without = paired(run, reference_workload(model), pairs, switches)
            ratios = [a / b for a, b in zip(taken, without, strict=True)]
            low, middle, high = (quantile(ratios, part) for part in (0.25, 0.5, 0.75))
            run.print(
                f"{model}, {what.__name__}: {statistics.median(without) * 1000:.1f} ms a step; with ÷ without "
                f"{middle:.4f} ({low:.3f} to {high:.3f}, {pairs} pairs), of the sums {sum(taken) / sum(without):.4f}"
            )


if __name__ == "__main__":
    main(*words())
