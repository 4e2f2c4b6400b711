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

    def close(self) -> None:
        """In the original: both files are the copy's, or nobody's."""
        os.close(self.output_fd)
        os.close(self.control_fd)


@dataclass(frozen=True)
class CopyStarted:
    """The copy runs, as this process."""

    pid: int


@dataclass(frozen=True)
class CopyDeclined:
    """Why the worker cannot be copied for this slot."""

    slot: int
    why: str


class ControlEnd:
    """One end of the socket. It never waits, except in `await_message`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def await_message(self, within_s: float) -> None:
        """Returns when there is a message, when the other end is closed, or after `within_s`."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        poll.poll(within_s * 1000)

    def close(self) -> None:
        self._socket.close()


class Control(ControlEnd):
    """The worker's end."""

    def __init__(self, fd: int) -> None:
        super().__init__(socket.socket(fileno=fd))
        os.set_inheritable(fd, False)

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
        self.await_message(within_s)
        return self.asked()

    def report_started(self) -> None:
        """In a new process. If nobody is left to follow it, it ends here."""
        try:
            self._socket.send(json.dumps({"pid": os.getpid()}).encode())
        except ConnectionError:
            os._exit(1)

    def decline(self, request: CopyRequest, why: str) -> None:
        request.close()
        with suppress(BlockingIOError, ConnectionError):  # workers end with their launcher anyway
            self._socket.send(json.dumps({"slot": request.slot, "why": why}).encode())


class ControlLine(ControlEnd):
    """The launcher's end; until `close_worker_end`, also the worker's."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)

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
        self.await_message(within_s)
        return self.answer()

    def close(self) -> None:
        super().close()
        self._theirs.close()
