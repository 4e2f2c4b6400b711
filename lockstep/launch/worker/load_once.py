"""Workers that share what is loaded: the first of them loads torch and lockstep, and forks the others.

# Note [Loaded once]
# A worker holds about 230 MiB before it has a model: the objects of Python and torch, in memory of its own. Forked
# processes share that memory until one of them writes to it, and most of it is never written to again. So worker 0
# loads before it runs the script what every worker would load, and the launcher asks it for the others, as it asks for
# a copy of a worker (see Note [Replacement by a copy] in control.py). Nothing of the script has run by then: a forked
# worker is a new one that has loaded its modules already. What loading does not see is a variable that the script sets
# before it imports torch; `lockstep.start` names those. Python's collector would write to every object: it leaves
# alone what is loaded (`gc.freeze`).
"""

import gc
import importlib
import os
import sys
from contextlib import suppress
from itertools import takewhile
from types import ModuleType

from lockstep.launch.channels.control import Control, CopyRequest
from lockstep.launch.worker import identity
from lockstep.launch.worker.fork import CannotFork, fork_for_launcher, take_part
from lockstep.settings.environment import drop_variables, note_loaded, process_environment, take_environment
from lockstep.settings.environments.lockstep_run import CONTROL_FD, FORKS, LISTEN_FD

_SLOW_TO_LOAD = ("torch", "torch.optim", "torch._inductor.config", "lockstep.run.start", "llvmlite.binding")
"""What a training script loads anyway, and what `lockstep.start` and the first optimizer load on top of it."""

REQUEST_S = 10.0
"""How long worker 0 waits for a request that the launcher has sent before it started it, or right after."""


_LAST: list[str] = []
"""The last module that was loaded before the script, if any was."""


def load() -> None:
    """Loads what takes long."""
    for module in _SLOW_TO_LOAD:
        with suppress(ImportError):  # a script that needs it will raise a better error
            importlib.import_module(module)
    note_loaded()
    _LAST[:] = [next(reversed(sys.modules))]


def loaded_by_script() -> list[ModuleType]:
    """The script, and the modules of this process without those of `load`: to look at one is to write to its memory."""
    newest = takewhile(lambda name: name not in _LAST, reversed(sys.modules))
    return [sys.modules[name] for name in dict.fromkeys(["__main__", *newest])]


def fork_others() -> None:
    """In a worker that others are to be forked from: loads, and forks them. Returns in each of them, as that worker.

    In any other worker it does nothing. See Note [Loaded once].
    """
    environ = process_environment()
    if FORKS not in environ:
        return
    drop_variables(FORKS)
    load()
    gc.collect()
    gc.freeze()
    control = Control(os.dup(int(environ[CONTROL_FD])))
    for _ in range(int(environ[FORKS])):
        request = control.await_request(REQUEST_S)
        if request is None or _forked(request, control):
            break
    control.close()


def _forked(request: CopyRequest, control: Control) -> bool:
    """Whether this is the new process."""
    boot = identity.OURS.boot
    assert boot is not None
    if (count := len(os.listdir("/proc/self/task"))) > 1:
        control.decline(request, f"{count} threads were there when torch was loaded")
        return False
    try:
        pid, pipe = fork_for_launcher(request)
    except CannotFork as error:
        control.decline(request, str(error))
        return False
    os.close(pipe)
    if pid:
        return False
    for fd in (boot.listen_fd, int(process_environment()[CONTROL_FD])):  # worker 0's own
        if fd is not None:
            os.close(fd)
    drop_variables(LISTEN_FD)
    take_part(request, is_copy=False)
    take_environment({CONTROL_FD: str(request.control_fd)})
    own = Control(os.dup(request.control_fd))
    own.report_started()
    own.close()
    return True
