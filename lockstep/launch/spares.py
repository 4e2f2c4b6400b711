"""Spares as the launcher sees them: warm processes, each with the pipe through which it gets its part."""

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lockstep.launch.orphans import OrphanGuard
from lockstep.launch.process import WorkerProcess, await_end

_KILL_WAIT_S = 1.0


@dataclass(frozen=True)
class Spare:
    """A process that will be a worker, and the pipe to it."""

    process: WorkerProcess
    part_fd: int


class Spares:
    """Owns the spares of a launch.

    A spare that dies is no failure. It is missed when a worker is needed, and the next one is taken.
    """

    def __init__(self, guard: OrphanGuard, make: Callable[[int], WorkerProcess]) -> None:
        """`make` starts a process that reads its part from the given pipe."""
        self._guard, self._make = guard, make
        self._waiting: list[Spare] = []

    def keep(self, number: int) -> None:
        """So many spares are waiting, not more. One that cannot be started is done without."""
        self._end(self._waiting[number:])
        del self._waiting[number:]
        with suppress(OSError):
            while len(self._waiting) < number:
                self._waiting.append(self._start())

    def take(self, variables: Mapping[str, str]) -> WorkerProcess | None:
        """A living spare that has got the variables of the worker it becomes; None if there is none."""
        while self._waiting:
            spare = self._waiting.pop(0)
            try:
                os.write(spare.part_fd, json.dumps(dict(variables)).encode())
            except BrokenPipeError:
                self._end([spare])
            else:
                os.close(spare.part_fd)
                return spare.process
        return None

    def close(self) -> None:
        """No spare is left."""
        self.keep(0)

    def _start(self) -> Spare:
        reader, writer = os.pipe()
        try:
            process = self._make(reader)
        except OSError:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        self._guard.note(process.group)
        return Spare(process, writer)

    def _end(self, spares: Sequence[Spare]) -> None:
        for spare in spares:
            spare.process.send_to_group(signal.SIGKILL)
            os.close(spare.part_fd)
        await_end([spare.process.pid for spare in spares], _KILL_WAIT_S)
        for spare in spares:
            self._guard.clear(spare.process.group)
            spare.process.reap()
