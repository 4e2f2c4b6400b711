"""What the launcher asks of a worker that runs, and what it is answered: over a socket that the two of them hold.

# Note [Replacement by a copy]
# A worker that was lost is best replaced by a copy of one that lives: the copy has the whole state of the script, its
# counters, schedulers and generators, and nothing has to be loaded. The launcher asks a member for it and hands it two
# files: where the copy writes its output, and the copy's own end of a socket like this one. The member forks where all
# form a new generation anyway (elastic/copies); the copy says its number over its own socket, and the launcher,
# to whom it falls when the process between them ends, follows it like every other worker. A member that cannot be
# copied says why.
"""

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

_MESSAGE_BYTES = 1 << 18
_FILES = 2


@dataclass(frozen=True)
class CopyRequest:
    """A copy of the worker is wanted, as another worker: with these variables, this output, this socket."""

    slot: int
    variables: Mapping[str, str]
    output_fd: int
    control_fd: int


@dataclass(frozen=True)
class CopyStarted:
    """A copy runs, as this process."""

    pid: int


@dataclass(frozen=True)
class CopyDeclined:
    """The worker cannot be copied for this slot, and why."""

    slot: int
    why: str


class Control:
    """The worker's end. Never waits."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        os.set_inheritable(fd, False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def asked(self) -> CopyRequest | None:
        """What the launcher wants, if it wants anything; 2 us if not."""
        try:
            message, files, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, _FILES)
        except (BlockingIOError, ConnectionError):
            return None
        if not message or len(files) != _FILES:
            return None
        fields = json.loads(message)
        return CopyRequest(fields["slot"], fields["variables"], *files)

    def report_started(self) -> None:
        self._send({"pid": os.getpid()})

    def decline(self, request: CopyRequest, why: str) -> None:
        os.close(request.output_fd)
        os.close(request.control_fd)
        self._send({"slot": request.slot, "why": why})

    def _send(self, message: Mapping[str, object]) -> None:
        with suppress(BlockingIOError, ConnectionError):  # a launcher that has gone takes its workers along
            self._socket.send(json.dumps(message).encode())

    def close(self) -> None:
        self._socket.close()


class ControlLine:
    """The launcher's end, and, until it is handed down, the worker's."""

    def __init__(self) -> None:
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def worker_fd(self) -> int:
        """The end that the worker gets: `handed_down` closes it here."""
        return self._theirs.fileno()

    def handed_down(self) -> None:
        self._theirs.close()

    def ask_for_copy(self, slot: int, variables: Mapping[str, str], output_fd: int, control_fd: int) -> bool:
        """Whether the worker could be asked."""
        message = json.dumps({"slot": slot, "variables": dict(variables)}).encode()
        try:
            socket.send_fds(self._socket, [message], [output_fd, control_fd])
        except (BlockingIOError, ConnectionError):
            return False
        return True

    def answer(self) -> CopyStarted | CopyDeclined | None:
        """What the worker has sent next; None if nothing, or it has gone."""
        try:
            message = self._socket.recv(_MESSAGE_BYTES)
        except (BlockingIOError, ConnectionError):
            return None
        fields = json.loads(message) if message else {}
        if "pid" in fields:
            return CopyStarted(fields["pid"])
        return CopyDeclined(fields["slot"], fields["why"]) if fields else None

    def close(self) -> None:
        self._socket.close()
        self._theirs.close()
