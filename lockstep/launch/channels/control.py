"""Requests of the launcher to a running worker, and the worker's answers, over a socket pair.

# Note [Replacement by a copy]
# A lost worker is best replaced by a copy of a live one: the copy has the whole state of the script, its counters,
# schedulers and generators, and nothing has to be loaded. The launcher sends a member the request with two files: where
# the copy writes its output, and the copy's own end of a socket like this one. The member forks when all form a new
# generation anyway (elastic/copies). The copy reports its process id over its own socket; the launcher adopts it when
# the process between them ends, and follows it like every other worker. A member that cannot be copied answers why.
"""

import json
import os
import select
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

_MESSAGE_BYTES = 1 << 18
_FILES = 2


@dataclass(frozen=True)
class CopyRequest:
    """A request to fork, as the worker in `slot`, with these variables, this output and this socket."""

    slot: int
    variables: Mapping[str, str]
    output_fd: int
    control_fd: int


@dataclass(frozen=True)
class CopyStarted:
    """The copy runs, as this process."""

    pid: int


@dataclass(frozen=True)
class CopyDeclined:
    """Why the worker cannot be copied for this slot."""

    slot: int
    why: str


class Control:
    """The worker's end. Only `await_request` waits."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        os.set_inheritable(fd, False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def asked(self) -> CopyRequest | None:
        """The launcher's next request, if there is one; takes 2 us if not."""
        try:
            message, files, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, _FILES)
        except (BlockingIOError, ConnectionError):
            return None
        if not message or len(files) != _FILES:
            return None
        fields = json.loads(message)
        return CopyRequest(fields["slot"], fields["variables"], *files)

    def await_request(self, within_s: float) -> CopyRequest | None:
        """The launcher's next request; None if there is none `within_s`."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        poll.poll(within_s * 1000)
        return self.asked()

    def report_started(self) -> None:
        """In a new process. If nobody is left to follow it, it ends here."""
        try:
            self._socket.send(json.dumps({"pid": os.getpid()}).encode())
        except ConnectionError:
            os._exit(1)

    def decline(self, request: CopyRequest, why: str) -> None:
        os.close(request.output_fd)
        os.close(request.control_fd)
        self._send({"slot": request.slot, "why": why})

    def _send(self, message: Mapping[str, object]) -> None:
        with suppress(BlockingIOError, ConnectionError):  # workers end with their launcher anyway
            self._socket.send(json.dumps(message).encode())

    def close(self) -> None:
        self._socket.close()


class ControlLine:
    """The launcher's end; until `close_worker_end`, also the worker's."""

    def __init__(self) -> None:
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def worker_fd(self) -> int:
        """The end that the worker inherits: `close_worker_end` closes it in the launcher."""
        return self._theirs.fileno()

    def close_worker_end(self) -> None:
        self._theirs.close()

    def ask_for_copy(self, slot: int, variables: Mapping[str, str], output_fd: int, control_fd: int) -> bool:
        """Whether the request was sent."""
        message = json.dumps({"slot": slot, "variables": dict(variables)}).encode()
        try:
            socket.send_fds(self._socket, [message], [output_fd, control_fd])
        except (BlockingIOError, ConnectionError):
            return False
        return True

    def answer(self) -> CopyStarted | CopyDeclined | None:
        """The worker's next message; None if there is none, or the worker has ended."""
        try:
            message = self._socket.recv(_MESSAGE_BYTES)
        except (BlockingIOError, ConnectionError):
            return None
        fields = json.loads(message) if message else {}
        if "pid" in fields:
            return CopyStarted(fields["pid"])
        return CopyDeclined(fields["slot"], fields["why"]) if fields else None

    def await_answer(self, within_s: float) -> CopyStarted | CopyDeclined | None:
        """The worker's next message; None if the worker has ended, or says nothing `within_s`."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        poll.poll(within_s * 1000)
        return self.answer()

    def close(self) -> None:
        self._socket.close()
        self._theirs.close()
