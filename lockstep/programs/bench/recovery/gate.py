"""Holds the workers before their first step until the driver has seen that all are ready. Without torch.

The gate is a locked file. Workers wait in the kernel, without computing; whoever comes when it is open passes at once,
as does everybody when the driver dies.
"""

import fcntl
from pathlib import Path
from types import TracebackType

_FILE = "gate"


class Gate:
    """The driver's hold on the gate: shut when entered, open after `open` or at the end."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE

    def __enter__(self) -> "Gate":
        self._file = self._path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return self

    def open(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def pass_gate(folder: Path) -> None:
    """Returns when the gate is open."""
    with (folder / _FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
