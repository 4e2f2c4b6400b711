"""The processes of a benchmark on a GPU: one for each side, or a launcher with its workers. Without torch."""

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
from lockstep.programs.bench.gpu.plan import Plan
from lockstep.programs.bench.gpu.talk import Talk
from lockstep.settings.environment import process_environment

PROGRAM = "lockstep.programs.bench.gpu.child"
SOCKET = "turns"

ARRIVAL_S = 180.0
"""How long the processes may take until they have loaded torch."""

ANSWER_S = 300.0
"""How long a child may take for anything that it is told: compiling a model is the longest."""

LEAVE_S = 10.0
HELLO_S = 10.0
LAST_LINES = 6
CAPTURING = "run.captured:"


class Child:
    """One side's processes. Once `failure` says why, it is told nothing more."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log: Path, num_members: int) -> None:
        self.name = name
        self.failure: str | None = None
        self.process = process
        self._log = log
        self._num_members = num_members
        self._talks: dict[int, Talk] = {}

    @property
    def is_there(self) -> bool:
        """All its processes have called."""
        return len(self._talks) == self._num_members

    def take(self, rank: int, talk: Talk) -> None:
        self._talks[rank] = talk

    def tell(self, **words: Any) -> None:
        """All its processes hear it; returns at once."""
        if self.failure is None:
            for talk in self._talks.values():
                talk.say(**words)

    def answers(self, timeout_s: float = ANSWER_S) -> list[dict[str, Any]] | None:
        """What each of its processes answers, by rank; None if one is gone or silent, and the child has failed."""
        if self.failure is not None:
            return None
        heard = [self._talks[rank].hear(timeout_s) for rank in sorted(self._talks)]
        found = [answer for answer in heard if answer is not None]
        if len(found) < self._num_members:
            self.fail(f"no answer within {timeout_s:g} s")
            return None
        return found

    def ask(self, **words: Any) -> list[dict[str, Any]] | None:
        self.tell(**words)
        return self.answers()

    def fail(self, otherwise: str) -> None:
        """Its processes are gone afterwards. `failure` is how they ended, or, if they had not, `otherwise`."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_S / 2)  # the socket closes a moment before the process ends
        ended = self.process.returncode
        self.end()
        how = otherwise if ended is None else f"ended with exit code {ended}"
        said = last_lines(self._log)
        self.failure = f"{how}: {said}" if said else how

    def remarks(self) -> list[str]:
        """What run.captured said about work that it did not capture, each once."""
        lines = _lines(self._log)
        return list(dict.fromkeys(line.strip() for line in lines if CAPTURING in line))

    def dismiss(self) -> None:
        """Nothing more is said: its processes end by themselves, once they have done what they were told."""
        for talk in self._talks.values():
            talk.close()
        self._talks.clear()

    def end(self) -> None:
        """None of its processes is left."""
        self.dismiss()
        for signum in (None, signal.SIGTERM, signal.SIGKILL):
            if signum is not None:
                _send(self.process, signum)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LEAVE_S)
                return


@contextmanager
def hired(plan: Plan, folder: Path, variables: Mapping[str, str]) -> Iterator[list[Child]]:
    """A child for every side, started all at once; those that could not start have failed. None is left afterwards."""
    with ExitStack() as stack:
        listener = stack.enter_context(_listening(folder / SOCKET))
        children = []
        for number, name in enumerate(plan.sides):
            child = _start(plan, name, folder, f"side-{number}", variables)
            stack.callback(child.end)
            children.append(child)
        stack.push(_dismissing(children))
        meet(listener, children, time.monotonic)
        yield children


def meet(listener: socket.socket, children: Sequence[Child], clock: Callable[[], float]) -> None:
    """All processes of every child have called, or the child has failed."""
    deadline_s = clock() + ARRIVAL_S
    by_name = {child.name: child for child in children}
    with ExitStack() as stack:
        exits = {_watch(child, stack): child for child in children}
        while waiting := [child for child in children if not child.is_there and child.failure is None]:
            watched = [fd for fd, child in exits.items() if child in waiting]
            calls = listener.fileno()
            ready, _, _ = select.select([calls, *watched], [], [], max(0.0, deadline_s - clock()))
            if calls in ready:
                _admit(listener, by_name)
                continue  # who called and then ended is told as one that ended, on the next look
            for child in [exits[fd] for fd in ready] if ready else waiting:
                child.fail(f"not ready within {ARRIVAL_S:g} s")


def last_lines(log: Path) -> str:
    """The end of what a process wrote, its error."""
    return "\n".join(_lines(log)[-LAST_LINES:])


def _lines(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [line for line in text.splitlines() if line.strip()]


def _admit(listener: socket.socket, children: Mapping[str, Child]) -> None:
    talk = Talk(listener.accept()[0])
    hello = talk.hear(HELLO_S)
    if hello is None or hello.get("side") not in children:
        talk.close()
        return
    children[hello["side"]].take(hello["rank"], talk)


def _watch(child: Child, stack: ExitStack) -> int:
    """A descriptor that can be read once the child's process has ended."""
    pidfd = os.pidfd_open(child.process.pid)
    stack.callback(os.close, pidfd)
    return pidfd


def _start(plan: Plan, name: str, folder: Path, place: str, variables: Mapping[str, str]) -> Child:
    log = folder / f"{place}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(plan, name, folder, folder / place),
            env={**process_environment(), **ON_THIS_HOST, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches the benchmark alone, and what a child started ends with it
        )
    return Child(name, process, log, plan.workers)


def command(plan: Plan, name: str, folder: Path, run_dir: Path) -> list[str]:
    """One process that is alone, or `lockstep run` with as many as there are workers; a lost one is not replaced.

    Not every side is a run of lockstep, and all of them do nothing while others have their turn.
    """
    words = [PROGRAM, plan.written(), name, str(folder)]
    if plan.workers == 1:
        return [sys.executable, "-m", *words]
    options = ["--torch-distributed", "--hang-s", str(TURNS_S), "--fault-budget", "0", "--run-dir", str(run_dir)]
    return [sys.executable, "-m", "lockstep", "run", "-n", str(plan.workers), *options, "-m", *words]


TURNS_S = 24 * 3600
"""For how long a side may have to wait for its turn."""

ON_THIS_HOST = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""What every side's processes find in their environment: process groups of torch's own stay on this host."""


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(str(path))
        except OSError as error:  # a path of more than 107 bytes, above all
            raise BadEnvironment(f"nobody can listen at {path}: {error}. Set TMPDIR to a short path") from error
        listener.listen(128)
        yield listener


def _dismissing(children: Sequence[Child]) -> Callable[..., None]:
    """For an ExitStack: all children leave at the same time; after an exception, Ctrl-C above all, at once."""

    def leave(kind: type[BaseException] | None, *_: Any) -> None:
        for child in children:
            child.dismiss()
            if kind is not None:
                _send(child.process, signal.SIGTERM)

    return leave


def _send(process: "subprocess.Popen[bytes]", signum: signal.Signals) -> None:
    """To the process and what it started in its group."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
