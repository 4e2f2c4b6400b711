"""`lockstep run` and its workers as forks of this process, which has torch: a launch costs tenths of a second.

Everything is real but the start of a process: the command line, the launcher, its pipes, signals and files, and the
workers. Where `lockstep run` would start Python and load torch, here a process is forked that has both.
"""

import atexit
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch._inductor.config  # noqa: F401 - what start and optimizers load, so that the workers need not

import lockstep.run.start  # noqa: F401
from lockstep.run.environments.lockstep_run import CONTROL_FD
from lockstep.run.launching import crew, spares
from lockstep.run.launching.control import ControlLine
from lockstep.run.launching.output import Tee
from lockstep.run.launching.process import NO_SLOT, Adopted, WorkerProcess

with suppress(ImportError):
    import llvmlite.binding  # noqa: F401 - what the wire loads

LIMIT_S = 120.0


class Launch:
    """A launch under way. What it shows is kept line by line."""

    def __init__(self, folder: Path, pid: int, output: int) -> None:
        self.folder, self.pid, self.exit_code = folder, pid, -1
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._output = output
        self._reader = threading.Thread(target=self._read, name="launch", daemon=True)
        self._reader.start()

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def shown(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, within_s: float = LIMIT_S, after: int = 0) -> int:
        """The number of the first line, from line `after` on, in which the pattern is found."""
        deadline_s = time.monotonic() + within_s
        with self._news:
            while True:
                for number in range(after, len(self.lines)):
                    if re.search(pattern, self.lines[number]):
                        return number
                if not self._reader.is_alive() or time.monotonic() > deadline_s:
                    raise AssertionError(f"{pattern!r} never came:\n{self.shown()}")
                self._news.wait(0.2)

    def finish(self, within_s: float = LIMIT_S) -> int:
        """The exit code, when all is over."""
        self._reader.join(within_s)
        assert not self._reader.is_alive(), f"the launch has not ended after {within_s} s:\n{self.shown()}"
        return self.close()

    def close(self) -> int:
        """Ends the launch if it has not ended by itself."""
        if self.exit_code == -1:
            if self._reader.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)
            self._reader.join()
        return self.exit_code

    def _read(self) -> None:
        with os.fdopen(self._output, encoding="utf-8", errors="replace") as output:
            for line in output:
                with self._news:
                    self.lines.append(line.rstrip("\n"))
                    self._news.notify_all()


@contextmanager
def launch(folder: Path, script: str, *options: str, command: str = "run", **variables: str) -> Iterator[Launch]:
    """`lockstep run OPTIONS --run-dir FOLDER/run train.py`, in `folder`; afterwards nothing of it is left.

    Or another command that launches workers.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "train.py"
    path.write_text(script)
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _guarded(
            _be_launcher, folder, writer, [command, *options, "--run-dir", str(folder / "run"), str(path)], variables
        )
    os.close(writer)
    launched = Launch(folder, pid, reader)
    try:
        yield launched
    finally:
        launched.close()
        _await_no_orphans()


def _await_no_orphans() -> None:
    """A launcher that was killed takes its workers along, in a moment."""
    gone = [child for child in psutil.Process().children(recursive=True) if _is_worker(child)]
    psutil.wait_procs(gone, timeout=5)


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.environ().get("LOCKSTEP_LAUNCHER") is not None
    return False


# -- in the launcher ---------------------------------------------------------------------------------------------


def _be_launcher(folder: Path, output: int, arguments: list[str], variables: Mapping[str, str]) -> None:
    _become(output, {output})
    os.chdir(folder)
    os.environ.update(variables)
    WorkerProcess.start = classmethod(_start)  # type: ignore[method-assign,assignment]
    from lockstep.cli.main import main

    sys.argv = ["lockstep", *arguments]
    main()


def _start(
    cls: type[WorkerProcess],
    command: Sequence[str],
    environment: Mapping[str, str],
    tee: Tee,
    pass_fds: Collection[int],
    slot: int = NO_SLOT,
) -> WorkerProcess:
    """In place of `WorkerProcess.start`."""
    control = ControlLine()
    variables = {**environment, CONTROL_FD: str(control.worker_fd)}
    pid = os.fork()
    if pid == 0:
        kept = {*pass_fds, control.worker_fd, tee.writer()}
        _guarded(_be_worker, list(command), variables, tee.writer(), kept)
    tee.handed_down()
    control.handed_down()
    return cls(Adopted(pid), os.pidfd_open(pid), tee, control, slot)


# -- in a worker --------------------------------------------------------------------------------------------------


def _be_worker(command: list[str], variables: Mapping[str, str], output: int, kept: set[int]) -> None:
    os.setsid()
    _become(output, kept)
    os.environ.clear()
    os.environ.update(variables)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)
    from lockstep.run.launching import spare, worker

    module = {"worker": worker, "spare": spare}[command[2].rpartition(".")[2]]
    sys.argv = [command[2], *command[3:]]
    module.main()
    worker._leave(0)


def _become(output: int, kept: Collection[int]) -> None:
    """A process of its own: with this output, and with no file of the one it was forked from."""
    atexit._clear()
    signal.set_wakeup_fd(-1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(output, stream)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and (fd not in kept or fd == output):
            with suppress(OSError):
                os.close(fd)
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # type: ignore[misc] # noqa: SIM115


def _guarded(be: Any, *arguments: Any) -> None:
    """What the process is; it never comes back."""
    code = 70
    try:
        be(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - shown where the test looks
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


__all__ = ["Launch", "launch"]
_ = (crew, spares, subprocess)
