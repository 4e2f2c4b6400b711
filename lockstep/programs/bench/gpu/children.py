"""The processes of a benchmark on a GPU: one for each side, or a launcher with its workers. Without torch."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.errors import BadEnvironment
from lockstep.programs.bench.gpu.plan import GpuStepPlan
from lockstep.programs.bench.launch import start_program
from lockstep.settings.environment import process_environment

PROGRAM = "lockstep.programs.bench.gpu.child"
SOCKET = "turns"

ARRIVAL_S = 180.0  # how long the processes may take until they have loaded torch
ANSWER_S = 300.0  # how long a child may take for any task: compiling a model is the longest
TURNS_S = 24 * 3600  # how long a side may have to wait for its turn
LEAVE_S = 10.0
HELLO_S = 10.0
LAST_LINES = 6
CAPTURING = "run.captured:"

ON_THIS_HOST = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables of every side's processes: torch's process groups stay on this host."""

Words = dict[str, Any]


class JsonConnection:
    """One end of a conversation between the process that measures and a child: JSON objects, one a line.

    It owns a connected socket, so that nothing a library prints is ever taken for an answer.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r", encoding="utf-8")

    @classmethod
    def to(cls, path: Path) -> "JsonConnection":
        """Connects to the socket that listens at `path`."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return cls(connection)

    def send(self, **words: Any) -> None:
        """Does nothing if the other end is gone."""
        with suppress(OSError):
            self._connection.sendall((json.dumps(words) + "\n").encode())

    def receive(self, timeout_s: float | None = None) -> Words | None:
        """The next message of the other end; None if it is gone, or sends nothing for `timeout_s`."""
        self._connection.settimeout(timeout_s)
        with suppress(OSError):  # also a timeout
            line = self._lines.readline()
            message: Words | None = json.loads(line) if line.endswith("\n") else None
            return message
        return None

    def close(self) -> None:
        """The other end notices it, although a process that was forked meanwhile may have the socket too."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()


class SideProcess:
    """One side's processes. Once `failure` is set, they get no more commands."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log: Path, num_members: int) -> None:
        self.name, self.process = name, process
        self.failure: str | None = None
        self.connections: dict[int, JsonConnection] = {}  # by rank
        self._log, self._num_members = log, num_members

    @property
    def is_awaited(self) -> bool:
        """Whether some of its processes have not connected yet."""
        return self.failure is None and len(self.connections) < self._num_members

    def send(self, **words: Any) -> None:
        """Sends the command to all its processes; returns at once."""
        if self.failure is None:
            for connection in self.connections.values():
                connection.send(**words)

    def answers(self) -> list[Words] | None:
        """The answers of its processes, by rank. If one does not answer, the side has failed: returns None."""
        if self.failure is not None:
            return None
        received = [self.connections[rank].receive(ANSWER_S) for rank in sorted(self.connections)]
        answers = [answer for answer in received if answer is not None]
        if len(answers) < self._num_members:
            self.fail(f"no answer within {ANSWER_S:g} s")
            return None
        return answers

    def ask(self, **words: Any) -> list[Words] | None:
        self.send(**words)
        return self.answers()

    def fail(self, reason: str) -> None:
        """Ends its processes. `failure` is how they ended; if they had not ended before, it is `reason`."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_S / 2)  # the socket closes a moment before the process ends
        ended = self.process.returncode
        self.end()
        how = reason if ended is None else f"ended with exit code {ended}"
        output = last_lines(self._log)
        self.failure = f"{how}: {output}" if output else how

    def remarks(self) -> list[str]:
        """The notes of run.captured about work that it did not capture, each once."""
        return list(dict.fromkeys(line.strip() for line in _lines(self._log) if CAPTURING in line))

    def dismiss(self) -> None:
        """Closes the connections: its processes end by themselves after their last command."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

    def end(self) -> None:
        """Ends all its processes."""
        self.dismiss()
        for signum in (None, signal.SIGTERM, signal.SIGKILL):
            self.signal(signum)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LEAVE_S)
                return

    def signal(self, signum: signal.Signals | None) -> None:
        """To the process and what it started in its group."""
        if signum is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)


def last_lines(log: Path) -> str:
    """The end of what a process wrote, its error."""
    return "\n".join(_lines(log)[-LAST_LINES:])


def _lines(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [line for line in text.splitlines() if line.strip()]


@contextmanager
def start_sides(plan: GpuStepPlan, folder: Path, variables: Mapping[str, str]) -> Iterator[list[SideProcess]]:
    """A child for every side, started all at once; those that could not start have failed. None is left afterwards."""
    environment = {**process_environment(), **ON_THIS_HOST, **variables}
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(folder / SOCKET))
        children: list[SideProcess] = []
        for number, name in enumerate(plan.sides):
            log = folder / f"side-{number}.log"
            process = start_program(command(plan, name, folder, log.with_suffix("")), environment, log)
            children.append(SideProcess(name, process, log, plan.workers))
            stack.callback(children[-1].end)

        def leave(kind: type[BaseException] | None, *_: object) -> None:
            """All children leave at the same time; after an exception, Ctrl-C above all, at once."""
            for child in children:
                child.dismiss()
                child.signal(None if kind is None else signal.SIGTERM)

        stack.push(leave)
        meet(listener, children, time.monotonic)
        yield children


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
    except OSError as error:  # a path of more than 107 bytes, above all
        listener.close()
        raise BadEnvironment(f"nobody can listen at {path}: {error}. Set TMPDIR to a short path") from error
    listener.listen(128)
    return listener


def command(plan: GpuStepPlan, name: str, folder: Path, run_dir: Path) -> list[str]:
    """One process that is alone, or `lockstep run` with as many as there are workers; a lost one is not replaced.

    Not every side is a run of lockstep, and all of them do nothing while others have their turn.
    """
    words = [PROGRAM, plan.written(), name, str(folder)]
    if plan.workers == 1:
        return [sys.executable, "-m", *words]
    options = ["--torch-distributed", "--hang-s", str(TURNS_S), "--fault-budget", "0", "--run-dir", str(run_dir)]
    return [sys.executable, "-m", "lockstep", "run", "-n", str(plan.workers), *options, "-m", *words]


def meet(listener: socket.socket, children: Sequence[SideProcess], clock: Callable[[], float]) -> None:
    """Waits until all processes of every child have connected, or the child has failed."""
    deadline_s = clock() + ARRIVAL_S
    with ExitStack() as stack:
        exits = {os.pidfd_open(child.process.pid): child for child in children}  # readable once it has ended
        for pidfd in exits:
            stack.callback(os.close, pidfd)
        while waiting := [child for child in children if child.is_awaited]:
            watched = [fd for fd, child in exits.items() if child in waiting]
            ready, _, _ = select.select([listener.fileno(), *watched], [], [], max(0.0, deadline_s - clock()))
            if listener.fileno() in ready:
                connection = JsonConnection(listener.accept()[0])
                hello, by_name = connection.receive(HELLO_S), {child.name: child for child in children}
                if hello is None or hello.get("side") not in by_name:
                    connection.close()
                else:
                    by_name[hello["side"]].connections[hello["rank"]] = connection
                continue  # one that connected and then ended is noticed in the next round
            for child in [exits[fd] for fd in ready] if ready else waiting:
                child.fail(f"not ready within {ARRIVAL_S:g} s")
