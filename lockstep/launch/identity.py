"""Which worker this process is. A module of its own: the worker's main module is `__main__`, and nobody imports that.

# Note [No orphan]
# The kernel kills this process when the launcher dies (PR_SET_PDEATHSIG). A launcher that died before that
# was set is noticed by its process id; the children of this process are the guard's (lockstep/launch/orphans.py).
"""

import ctypes
import os
import signal
from dataclasses import dataclass

from lockstep.launch.stacks import answer_stack_queries
from lockstep.settings.environment import process_environment
from lockstep.settings.environments.lockstep_run import Bootstrap, bootstrap

_PR_SET_PDEATHSIG = 1


@dataclass
class Identity:
    """What a process that was launched is. `pid` distinguishes it from processes that it forks."""

    boot: Bootstrap | None = None
    pid: int = 0
    is_copy: bool = False
    """It was forked from another worker, and cannot be taken apart as Python would. See elastic/copies/fork.py."""

    @property
    def is_worker(self) -> bool:
        """Whether the launcher knows this very process."""
        return self.boot is not None and self.pid == os.getpid()


OURS = Identity()


def settle(*, is_copy: bool = False) -> None:
    """This process is the worker that its variables say, and dies with its launcher; if they say none, it is nobody."""
    OURS.boot, OURS.pid, OURS.is_copy = bootstrap(process_environment()), os.getpid(), is_copy
    if OURS.boot is not None:
        die_with(OURS.boot.parent_pid)
        answer_stack_queries(OURS.boot.run_dir, OURS.boot.slot)


def die_with(parent_pid: int) -> None:
    """See Note [No orphan]."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
