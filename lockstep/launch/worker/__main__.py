"""The process that `lockstep run` starts: runs the user's script as `python script.py` would.

python -m lockstep.launch.worker site.py [arguments]
python -m lockstep.launch.worker --module name [arguments]
"""

import atexit
import faulthandler
import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from lockstep.errors import advise
from lockstep.launch.channels.exits import CTRL_C, LEFT_OUT, MISPLACED, TERMINATED, USER_ERROR, OutOfPlace
from lockstep.launch.channels.failure import Failure, notice_of, write_report
from lockstep.launch.worker import identity
from lockstep.launch.worker.identity import OURS
from lockstep.launch.worker.load_once import fork_others
from lockstep.settings.environments.lockstep_run import Bootstrap

# Codes with which lockstep itself ends the process; the launcher knows them.
_OF_LOCKSTEP = (TERMINATED, LEFT_OUT, MISPLACED)


def main() -> None:
    """Runs the script that the command line names, and reports an exception to the launcher."""
    identity.settle()
    fork_others()
    if OURS.boot is not None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # "leave after the step": a run will handle it
        _keep_from_children(OURS.boot)
    faulthandler.enable()
    try:
        _restore_signals()
        _run(sys.argv[1:])
    except KeyboardInterrupt:
        _leave(CTRL_C)
    except (SystemExit, Exception) as exception:
        code = _exit_code(exception)
        if code == TERMINATED:
            _leave(TERMINATED)
        _end_by(exception, code)
        raise
    if OURS.is_copy:
        _leave(0)


def _end_by(exception: BaseException, code: int) -> None:
    """Ends the process, unless it should end in Python's own way: it was not launched, or the script forked it."""
    if OURS.boot is None or not OURS.is_worker:
        return
    is_reported = code not in (0, *_OF_LOCKSTEP) or isinstance(exception, OutOfPlace)
    try:
        if is_reported:
            _report(exception, OURS.boot)
    finally:
        if is_reported or OURS.is_copy:
            _leave(code)


def _exit_code(exception: BaseException) -> int:
    """The exit code that Python would give a process which ends by the exception."""
    if not isinstance(exception, SystemExit):
        return USER_ERROR
    if exception.code is None or isinstance(exception.code, int):
        return (exception.code or 0) & 0xFF
    return USER_ERROR


def _run(arguments: list[str]) -> None:
    if arguments[0] == "--module":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(os.path.abspath(arguments[0]), run_name="__main__")


def _report(exception: BaseException, boot: Bootstrap) -> None:
    """Writes the report into the run's folder and notifies the launcher, which copies the traceback to the log."""
    advise(exception)
    step, rank_now = _failed_run()
    failure = Failure.of(exception, boot.slot, step, rank_now)
    try:
        write_report(failure, boot.run_dir)
        has_report = True
    except OSError:  # a full disk, for example: the screen still gets the traceback
        traceback.print_exception(exception)
        has_report = False
    os.write(boot.notice_fd, notice_of(failure, has_report))


def _failed_run() -> tuple[int | None, int | None]:
    """The step of the active run and the rank in it. The run is marked as failed: it does not wait for its peers."""
    active = sys.modules.get("lockstep.run.active")
    run = active.current() if active is not None else None
    if run is None:
        return None, None
    run.failed = True
    return int(run.step), getattr(run, "rank", None)


def _leave(code: int) -> None:
    """Ends the process as Python would, except that no native thread can block the exit."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _keep_from_children(boot: Bootstrap) -> None:
    for fd in (boot.notice_fd, boot.listen_fd, boot.status_fd):
        if fd is not None:
            os.set_inheritable(fd, False)


def _restore_signals() -> None:
    """A shell that starts the launcher in the background may have made it, and this process, ignore Ctrl-C.

    The launcher blocks Ctrl-C where it starts this process, and threads of a Ray actor do.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
