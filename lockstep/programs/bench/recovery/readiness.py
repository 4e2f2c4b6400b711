"""Whether a spare is warm: it has loaded torch and now waits for its part without computing. Without torch."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.launch.process_stats import ProcessState, process_state
from lockstep.programs.bench.recovery.program import descendants

QUIET_S = 0.5
_SPARE = "lockstep.launch.spare"
_LOADED = "libtorch_python"


class Quiet:
    """Whether something stands still: it was the same at every look for QUIET_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: object = None
        self._since_s = clock()

    def at(self, seen: object) -> bool:
        if seen != self._seen:
            self._seen, self._since_s = seen, self._clock()
        return self._clock() - self._since_s >= QUIET_S


class Warmth:
    """Looks at the spares of a launcher, again and again, until all are warm."""

    def __init__(self, launcher_pid: int, num_spares: int) -> None:
        self._launcher_pid, self._num_spares = launcher_pid, num_spares
        self._quiet = Quiet()

    def reached(self) -> bool:
        if not self._num_spares:
            return True
        spares = find_spares(self._launcher_pid)
        rested = self._quiet.at([process_state(pid) for pid in spares])
        return rested and len(spares) == self._num_spares and all(_is_waiting(pid) for pid in spares)


def find_spares(launcher_pid: int) -> list[int]:
    return [pid for pid in descendants(launcher_pid) if _SPARE in _words(pid)]


def _is_waiting(pid: int) -> bool:
    found: ProcessState | None = process_state(pid)
    return found is not None and found.state == "S" and _LOADED in _read(pid, "maps")


def _words(pid: int) -> Sequence[str]:
    return _read(pid, "cmdline").split("\0")


def _read(pid: int, name: str) -> str:
    """Empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
