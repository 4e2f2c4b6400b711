"""A launcher with its workers, as the driver holds it: lockstep's or torchrun. Without torch."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lockstep.launch.orphans import OrphanGuard
from lockstep.launch.process import await_end
from lockstep.launch.signals import SCALE, LauncherSignals
from lockstep.programs.bench.launching import Stopped

LOOK_S = 0.02
END_S = 10.0
_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Program:
    """Runs from `with` on. Afterwards neither the launcher nor any of its descendants is left.

    They are also ended if this process is killed: by the guard, which knows of the launcher and of those noted.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: Path, guard: OrphanGuard
    ) -> None:
        self._command, self._environment, self.output, self._guard = command, environment, output, guard
        self._noted: set[int] = set()

    def __enter__(self) -> "Program":
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the driver alone, which ends everything in order
            )
        self.note(self._process.pid)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def note(self, group: int) -> None:
        """The process group is ended with this process: for workers that would outlive their launcher."""
        if group not in self._noted:
            self._noted.add(group)
            self._guard.note(group)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._end()
        for group in self._noted:
            self._guard.clear(group)

    def _end(self) -> None:
        """Both launchers end their workers when they get SIGTERM; what does not end is killed."""
        family = [self.pid, *descendants(self.pid)]
        self._process.send_signal(signal.SIGTERM)
        await_end([self.pid], END_S)
        family += [pid for pid in descendants(self.pid) if pid not in family]
        if not await_end(family, 1.0):
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await_end(family, 1.0)
        self._process.wait()


class Watch:
    """Waits for what other processes do; a signal or too long a wait ends the benchmark with `Stopped`."""

    def __init__(self, signals: LauncherSignals, clock: Callable[[], float] = time.monotonic) -> None:
        self._signals, self._clock = signals, clock

    def until(self, reached: Callable[[], object], within_s: float, awaited: str) -> None:
        """Returns when `reached()`; looks fifty times a second."""
        deadline_s = self._clock() + within_s
        while not reached():
            if self._clock() > deadline_s:
                raise Stopped(f"✗ {awaited} did not come within {within_s:.0f} s", 1, interrupted=False)
            self.rest(LOOK_S)

    def rest(self, seconds: float) -> None:
        """Lets the time pass."""
        select.select([self._signals], [], [], seconds)
        for signum in self._signals.take():
            if signum != SCALE:
                raise Stopped("✗ stopped; all workers have ended", _EXIT_CODES[signum], interrupted=True)


def descendants(pid: int) -> list[int]:
    """The processes that `pid` has started, those that these have, and so on."""
    parents = {child: parent for child in _processes() if (parent := _parent(child)) is not None}
    found, waiting = [], [pid]
    while waiting:
        above = waiting.pop()
        children = [child for child, parent in parents.items() if parent == above]
        found += children
        waiting += children
    return found


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int | None:
    """None if the process is gone."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[1])  # the name before may hold anything
    return None
