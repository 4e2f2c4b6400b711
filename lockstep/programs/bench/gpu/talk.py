"""One end of a conversation between the process that measures and a child: JSON objects, one a line. Without torch.

It has a socket of its own, so that nothing a library prints is ever taken for an answer.
"""

import json
import socket
from pathlib import Path
from typing import Any


class Talk:
    """Owns a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r", encoding="utf-8")

    @classmethod
    def to(cls, path: Path) -> "Talk":
        """Calls whoever listens at `path`."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return cls(connection)

    def say(self, **words: Any) -> bool:
        """Whether the other end is still there to hear it."""
        try:
            self._connection.sendall((json.dumps(words) + "\n").encode())
        except OSError:
            return False
        return True

    def hear(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """What the other end says next; None if it is gone, or silent for `timeout_s`."""
        self._connection.settimeout(timeout_s)
        try:
            line = self._lines.readline()
        except OSError:  # also a timeout
            return None
        heard: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return heard

    def close(self) -> None:
        self._lines.close()
        self._connection.close()
