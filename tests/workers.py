"""Real workers for tests: processes forked from one that has torch loaded, so that each costs milliseconds.

`on_workers(3, job, ...)` runs `job(...)` in three processes that find each other as under `lockstep run`, and gives
what each returned (as JSON). Whatever a job starts dies with it.
"""

import ast
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any

import loaded  # noqa: F401 - seconds that the workers need not spend each
import torch

from lockstep.run import active
from lockstep.script.lanes import marks
from lockstep.script.lanes.tables import may_have_rows, rows_in
from lockstep.script.source.goes_on import gone_on_in
from lockstep.script.source.methods import methods_of
from lockstep.script.source.syntax import parsed, walked
from lockstep.settings.environments.lockstep_run import LISTEN_FD, MARK, PORT, RANK, SIZE

TESTS = str(Path(__file__).parent)


@dataclass(frozen=True)
class Outcome:
    """What one worker's job came to: `value`, or the class and message of what it raised, or a signal's number."""

    value: Any = None
    error: str | None = None
    message: str = ""
    killed_by: int | None = None


def outcomes(
    num_workers: int, job: Callable[..., Any], *args: Any, limit_s: float = 60.0, **options: Any
) -> list[Outcome]:
    """Runs `job` in `num_workers` processes; gives every worker's outcome, by rank."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        places = [partial(_place, rank, num_workers, listener) for rank in range(num_workers)]
        processes = [fork(place, limit_s, job, args, options) for place in places]
    return gather(processes, limit_s)


def gather(processes: Sequence[tuple[int, int]], limit_s: float) -> list[Outcome]:
    """Waits for forked workers and gives their outcomes; afterwards none of them is left."""
    deadline = time.monotonic() + limit_s
    try:
        return [_collect(pid, reader, deadline) for pid, reader in processes]
    finally:
        for pid, _ in processes:
            _end(pid)


def on_workers(num_workers: int, job: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What `job` returned on each worker; fails if one raised or died."""
    return all_values(outcomes(num_workers, job, *args, **options))


def apart(test: Callable[..., None]) -> Callable[..., None]:
    """The test in a process of its own: what it loads or keeps costs no later test that forks this process."""

    @wraps(test)
    def forked(*args: Any, **options: Any) -> None:
        on_workers(1, test, *args, **options)

    return forked


def all_values(found: Sequence[Outcome]) -> list[Any]:
    """What each worker returned; fails if one raised or died."""
    for rank, outcome in enumerate(found):
        assert outcome.error is None, f"worker {rank}: {outcome.error}: {outcome.message}"
        assert outcome.killed_by is None, f"worker {rank} was killed by signal {outcome.killed_by}"
    return [outcome.value for outcome in found]


def fork(
    place: Callable[[], None], limit_s: float, job: Callable[..., Any], args: Any, options: Any
) -> tuple[int, int]:
    """Starts a worker that takes its `place` and does the job; gives its process and where its reply is read."""
    _read_scripts()
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    active._num_before = 0  # runs of the tests' own process are none of the worker's
    gc.freeze()  # the worker looks only through what it has made itself
    torch.set_num_threads(torch.get_num_threads())  # see Note [A pool without threads] in elastic/copies/fork.py
    # A process that the worker forks has no part in the reply: the test does not wait for it.
    os.register_at_fork(after_in_child=lambda: os.close(writer))
    try:
        faulthandler.dump_traceback_later(limit_s - 2, file=sys.__stderr__)  # where a worker that hangs is
        os.setpgid(0, 0)
        place()
        reply = _attempt(job, args, options)
        with os.fdopen(writer, "w") as pipe:
            json.dump(reply, pipe, default=repr)
        os._exit(0)
    finally:
        os._exit(70)


def _read_scripts() -> None:
    """What every worker would read of its script, which is the files of the test: it finds that read."""
    _read(frozenset(path for path, _ in marks.users_modules(len(sys.modules)) if path.startswith(TESTS)))


@lru_cache(maxsize=1)
def _read(files: frozenset[str]) -> None:
    for path in files:
        tree = parsed(path)
        for look in (gone_on_in, rows_in):
            look(path)
        may_have_rows(path, "")
        for one in () if tree is None else walked(tree):
            if isinstance(one, ast.ClassDef):
                methods_of(path, one.name)


def _place(rank: int, num_workers: int, listener: socket.socket) -> None:
    os.environ |= {
        MARK: "tests",
        RANK: str(rank),
        SIZE: str(num_workers),
        PORT: str(listener.getsockname()[1]),
        # As with --torch-distributed: jobs open process groups of their own.
        "RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "MASTER_PORT": str(listener.getsockname()[1]),
    }
    if rank == 0:
        os.environ[LISTEN_FD] = str(os.dup(listener.fileno()))
    listener.close()


def _attempt(job: Callable[..., Any], args: Any, options: Any) -> dict[str, Any]:
    try:
        reply = {"value": job(*args, **options)}
    except BaseException as error:  # noqa: BLE001 - told to the test
        traceback.print_exc()
        if (run := active.current()) is not None:
            run.failed = True
        reply = {"error": type(error).__name__, "message": str(error)}
    if (run := active.current()) is not None:
        run.close()
    return reply


def _collect(pid: int, reader: int, deadline: float) -> Outcome:
    text = b""
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (piece := os.read(reader, 65536)):
            break
        text += piece
    else:
        os.close(reader)
        return Outcome(error="TimeoutError", message="the worker did not end in time")
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return Outcome(killed_by=os.WTERMSIG(status))
    return Outcome(**json.loads(text))


def _end(pid: int) -> None:
    """Ends a worker and all it started, if it has not ended by itself."""
    try:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError, PermissionError):
        pass
