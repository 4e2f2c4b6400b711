"""A small process that outlives a killed launcher just long enough to end what it left behind.

# Note [The guard]
# When the launcher is killed, the kernel kills its workers (see lockstep/launch/worker.py), but not their
# children: a data-loader process would stay for seconds, or for ever. The guard reads from a pipe that only
# the launcher writes. The launcher notes there every worker it starts and every worker it has cleared away.
# When the pipe ends, whatever is still noted has lost its launcher, and its process group is killed. Every
# worker leads a group of its own, to which its children belong.

This file is run by path, in a bare interpreter: it imports nothing but the standard library.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress


class OrphanGuard:
    """Owns the guard process. While it is open, no noted process group outlives this process."""

    def __enter__(self) -> "OrphanGuard":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,  # Ctrl-C in the terminal is not for the guard
        )
        return self

    def note(self, group: int) -> None:
        """The group will be killed if this process ends now."""
        self._write(f"+{group}\n")

    def clear(self, group: int) -> None:
        """The group will not be killed any more: its number may soon belong to somebody else."""
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a guard that somebody killed is missed only if we are killed as well
            self._process.stdin.write(line.encode())

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Returns when the launcher has gone, and everything that it had noted with it."""
    noted: set[int] = set()
    for line in sys.stdin:
        (noted.add if line[0] == "+" else noted.discard)(int(line[1:]))
    for group in noted:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
