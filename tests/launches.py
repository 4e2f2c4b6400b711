"""`lockstep` and its workers as forks of this process, which has torch: a launch costs tenths of a second.

Everything is real but the start of a process: the command line, the launcher, its pipes, signals and files, and the
workers. Where Python would be started and would load torch, a process is forked that has both.
"""

import atexit
import ctypes
import faulthandler
import gc
import io
import multiprocessing.util
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import loaded  # noqa: F401 - what the workers need not load
import psutil

from lockstep.cli import main as command_line
from lockstep.cli import run as _  # noqa: F401 - what the command line loads when it is needed
from lockstep.launch.pools import process
from lockstep.launch.worker import __main__ as worker
from lockstep.launch.worker import spare
from lockstep.run import active
from lockstep.settings.environments.lockstep_run import PARENT_PID

LIMIT_S = 120.0
REPOSITORY = Path(__file__).parents[1]
MAINS = {"lockstep": command_line.main, "lockstep.launch.worker": worker.main, spare.__name__: spare.main}
"""Those that are loaded already."""
IMPORTABLE = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])


class Forked(subprocess.Popen[Any]):
    """`python -m MODULE ...` or `python -c CODE ...`, forked instead of started.

    As with any fork, PYTHON* variables have no effect; `sys.path` is that of the tests.
    """

    def _execute_child(
        self, args: Sequence[str], executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Collection[int],
        cwd: Any, env: Mapping[str, str] | None, startupinfo: Any, creationflags: int, shell: bool, *rest: Any
    ) -> None:  # fmt: skip
        """In place of the method that forks, and runs another program in the fork."""
        pipes, start_new_session = rest[:6], rest[11]
        sys.stdout.flush()
        sys.stderr.flush()
        ready, is_ready = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()  # the process looks only through what it has made itself
            if start_new_session:
                os.setsid()
            os.close(is_ready)
            _never_return(args, env, cwd, (pipes[0], pipes[3], pipes[5]), set(pass_fds))
        os.close(is_ready)
        os.read(ready, 1)  # as subprocess does: when this returns, the process leads its group and can be ended by it
        os.close(ready)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


_names = {**vars(subprocess), "Popen": Forked}
_run_forked = FunctionType(subprocess.run.__code__, _names)
_run_forked.__kwdefaults__ = subprocess.run.__kwdefaults__
FORKING: Any = SimpleNamespace(**{**_names, "run": _run_forked})
"""What a module that imports `subprocess` is given in its place, so that what it starts is forked."""


def start_lockstep(
    *words: str,
    cwd: Path,
    popen: type["subprocess.Popen[Any]"] = Forked,
    stdout: Any = subprocess.PIPE,
    **variables: str,
) -> "subprocess.Popen[str]":
    """`lockstep WORDS` in the folder, with these variables too. With `subprocess.Popen` it is started from nothing."""
    return popen(
        [sys.executable, "-m", "lockstep", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": IMPORTABLE, **variables},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


# -- in the fork -------------------------------------------------------------------------------------------------


def _never_return(
    args: Sequence[str], env: Mapping[str, str] | None, cwd: Any, streams: Sequence[int], kept: set[int]
) -> None:
    """This process is the program, and ends with it."""
    code = 1
    active._num_before = 0  # runs of the tests' own process are none of this one
    try:
        _forget_parent(streams, kept)
        _take_environment(os.environ.copy() if env is None else env)
        if cwd is not None:
            os.chdir(cwd)
        code = _run(list(args[1:]))
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - shown where the test looks
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(words: list[str]) -> int:
    """The exit code that Python would give."""
    process.subprocess = FORKING
    kind, program, *rest = words
    sys.argv, sys.path = [program, *rest], [os.getcwd(), *sys.path]
    try:
        if kind == "-c":
            exec(program, {"__name__": "__main__"})
        elif program in MAINS:
            MAINS[program]()
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - as Python itself would tell it
        traceback.print_exc()
        return 1
    return 0


def _forget_parent(streams: Sequence[int], kept: set[int]) -> None:
    """A process with these standard streams, and with no file, signal handler or exit function of its parent."""
    faulthandler.disable()
    atexit._clear()
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    tempfile.tempdir = None
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(signum, signal.SIG_DFL)
    _take_streams(streams)
    _leave_files(kept)


def _leave_files(kept: set[int]) -> None:
    """Their numbers stay taken: an object of the parent may still close them."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with suppress(OSError):
                os.fstat(fd)
                os.dup2(nowhere, fd, inheritable=False)


def _take_streams(streams: Sequence[int]) -> None:
    sources = [os.dup(fd if fd != -1 else standard) for standard, fd in enumerate(streams)]
    for standard, source in enumerate(sources):
        os.dup2(source, standard)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stdout = sys.__stdout__ = _written_at_once(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _written_at_once(2, "backslashreplace")  # type: ignore[misc]


def _written_at_once(fd: int, errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8", errors, write_through=True)  # type: ignore[type-var]


def _take_environment(variables: Mapping[str, str]) -> None:
    """Others see it too, in /proc/PID/environ: it is written there, as much as there is room for, ours first."""
    os.environ.clear()
    os.environ.update(variables)
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    ours_first = sorted(variables.items(), key=lambda item: not item[0].startswith("LOCKSTEP"))
    written = b"".join(f"{name}={value}\0".encode() for name, value in ours_first)
    if begin:
        ctypes.memmove(begin, written[: end - begin].ljust(end - begin, b"\0"), end - begin)


# -- a launch with its output ------------------------------------------------------------------------------------


class Launch:
    """A launch under way. What it shows is kept line by line."""

    def __init__(self, folder: Path, launcher: "subprocess.Popen[str]") -> None:
        self.folder, self.pid, self.exit_code = folder, launcher.pid, -1
        self.lines: list[str] = []
        self._launcher = launcher
        self._news = threading.Condition()
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
                end_launch(self._launcher)
            self.exit_code = self._launcher.wait()
            self._reader.join()
        return self.exit_code

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        with self._launcher.stdout as output:
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
    launched = Launch(
        folder,
        Forked(
            [sys.executable, "-m", "lockstep", command, *options, "--run-dir", str(folder / "run"), str(path)],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ),
    )
    try:
        yield launched
    finally:
        launched.close()


def finish(launcher: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """The exit code, and what came on both streams."""
    out, err = launcher.communicate(timeout=90)
    return launcher.returncode, out, err


def end_launch(launcher: "subprocess.Popen[Any]") -> None:
    """Kills the launcher; it takes its workers along, in a moment, and that is awaited."""
    workers = [one for one in psutil.process_iter() if _variables(one).get(PARENT_PID) == str(launcher.pid)]
    launcher.kill()
    launcher.wait()
    psutil.wait_procs(workers, timeout=5)


def _variables(one: psutil.Process) -> dict[str, str]:
    with suppress(psutil.Error):
        return dict(one.environ())
    return {}
