"""A small process that outlives a killed launcher just long enough to end what it left behind.

# Note [The guard]
# When the launcher is killed, the kernel kills its workers (see Note [No orphan] in identity.py), but not their
# children: a data-loader process would stay for seconds, or for ever. The guard reads from a pipe that only
# the launcher writes. The launcher notes there every worker it starts and every worker it has cleared away.
# When the pipe ends, the guard kills the process groups that are still noted. Every worker leads a group of its own,
# to which its children belong.

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
        """From now on the guard kills the group if this process ends."""
        self._write(f"+{group}\n")

    def clear(self, group: int) -> None:
        """The guard no longer kills the group: the kernel may soon use its number for another one."""
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a killed guard is missed only if this process is killed as well
            self._process.stdin.write(line.encode())

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Returns when the launcher has ended, and all groups that it had noted are killed."""
    noted: set[int] = set()
    for line in sys.stdin:
        (noted.add if line[0] == "+" else noted.discard)(int(line[1:]))
    for group in noted:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
