"""Runs before a script of the corpus, in every worker: disturbs it in logical time, and says what it came to.

What shall happen stands in CORPUS, as JSON: `kills` of workers at steps (each once in all), and, in `collects`, where
they collect what lanes have given, from a step on; `scale` to so many workers at a step, `stop` the run at a step as
SIGTERM does, or `crash` it, from a step on, once its newest checkpoint has a trail: launcher and workers are killed.
Afterwards `digest-<slot>-<pid>` in the working folder has the digest of each worker that came to its end.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import lockstep
from lockstep.events import Closed, Event, StepBegan, Wait, WaitBegan
from lockstep.launch.scale import ask_for
from lockstep.run.run import Run
from lockstep.run.start import start

PLAN: dict[str, Any] = json.loads(os.environ.get("CORPUS", "{}"))
PATIENCE_S = 40.0
"""How long a worker waits for what shall happen. If it has not come by then the run goes on all the same."""


class Watch:
    """One worker of a run that is disturbed."""

    def __init__(self, run: Run) -> None:
        self.run, self._rank = run, run.guard.generation.wire.world.rank
        run._events.subscribe(self)

    @property
    def slot(self) -> int:
        return int(os.environ.get("LOCKSTEP_SLOT", self._rank))

    def __call__(self, event: Event) -> None:
        match event:
            case StepBegan(step=step):
                self._begin(step)
            case WaitBegan(step=step, wait=Wait.TOTAL | Wait.GATHER):
                self._collect(step)
            case Closed(step=step) if (
                not self.run.failed and not self.run.guard.signals.terminate and not self.run.guard.signals.leave
            ):
                Path(f"digest-{self.slot}-{os.getpid()}").write_text(f"{self.run.digest()} {step}")

    def _begin(self, step: int) -> None:
        for kill in PLAN.get("kills", ()):
            if kill == [self.slot, step] and _first_time(f"kill {kill}"):
                os.kill(os.getpid(), signal.SIGKILL)
            if step > kill[1] + 1 and self.run.size < PLAN["workers"]:
                self._await_newcomer()
        for at, wanted in PLAN.get("scale", ()):
            if step == at and self.run.is_first and _first_time(f"scale {[at, wanted]}"):
                ask_for(Path(os.environ["LOCKSTEP_RUN_DIR"]), wanted)
            if step == at + 1:
                self._await_change(wanted)
        if 0 <= PLAN.get("crash", -1) <= step and _has_trail() and _first_time("crash"):
            os.kill(int(os.environ["LOCKSTEP_PARENT_PID"]), signal.SIGKILL)
            time.sleep(PATIENCE_S)  # until this worker is ended too
        if step == PLAN.get("stop") and self.run.is_first and _first_time("stop"):
            os.kill(int(os.environ["LOCKSTEP_PARENT_PID"]), signal.SIGTERM)
            _await(lambda: self.run.guard.signals.terminate)

    def _collect(self, step: int) -> None:
        for kill in PLAN.get("collects", ()):
            if kill[0] == self.slot and step >= kill[1] and _first_time(f"collect {kill}"):
                os.kill(os.getpid(), signal.SIGKILL)

    def _await_change(self, wanted: int) -> None:
        """Returns when what was asked for has come to this worker, if it is the one that has to do something."""
        guard = self.run.guard
        if wanted < self.run.size and self.slot >= wanted:
            _await(lambda: self.run.guard.signals.leave)
        elif wanted > self.run.size and guard.recovery is not None and self.slot == max(guard.generation.slots):
            copier, recovery = guard.formation.copier, guard.recovery
            _await(lambda: (copier is not None and copier.is_asked()) or recovery.has_claims())

    def _await_newcomer(self) -> None:
        """A replacement that runs the script from the top needs a moment. It is waited for once."""
        recovery = self.run.guard.recovery
        if recovery is not None and recovery.is_coordinator and PLAN.get("awaits_newcomer") and _first_time("awaited"):
            _await(recovery.has_claims)
            self.run.guard.look_for_newcomers()


def _has_trail() -> bool:
    """Whether the newest checkpoint is on the disk, and what the run has come to behind it."""
    checkpoints = sorted(Path(os.environ["LOCKSTEP_RUN_DIR"]).glob("checkpoints/step-*"))
    return bool(checkpoints) and (checkpoints[-1] / "trail.jsonl").exists()


def _await(reached: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not reached() and time.monotonic() < deadline_s:
        time.sleep(0.002)


def _first_time(what: str) -> bool:
    """Whether it has not happened before, in any worker."""
    try:
        os.close(os.open(f"done {what}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _start(**options: Any) -> Run:
    run = start(**options)
    Watch(run)
    return run


lockstep.start = _start  # type: ignore[attr-defined]
