"""Which worker this process is. A module of its own: the worker's main module is `__main__`, and cannot be imported.

# Note [No orphan]
# The kernel kills this process when the launcher dies (PR_SET_PDEATHSIG). If the launcher died before that was set, the
# parent's process id shows it. The guard (lockstep/launch/host/orphans.py) ends the children of this process.
"""

import ctypes
import os
import signal
from dataclasses import dataclass

from lockstep.launch.channels.stacks import answer_stack_queries
from lockstep.settings.environment import process_environment
from lockstep.settings.environments.lockstep_run import Bootstrap, bootstrap

_PR_SET_PDEATHSIG = 1


@dataclass
class Identity:
    """The worker that a process was launched as. `pid` distinguishes it from processes that it forks."""

    boot: Bootstrap | None = None
    pid: int = 0
    is_copy: bool = False
    """It was forked from another worker, and cannot end by Python's own shutdown. See elastic/copies/fork.py."""

    @property
    def is_worker(self) -> bool:
        """Whether the launcher started this very process, or adopted it."""
        return self.boot is not None and self.pid == os.getpid()


OURS = Identity()


def settle(*, is_copy: bool = False) -> None:
    """Sets OURS from the environment variables. If they name a worker, this process dies with its launcher."""
    OURS.boot, OURS.pid, OURS.is_copy = bootstrap(process_environment()), os.getpid(), is_copy
    if OURS.boot is not None:
        die_with(OURS.boot.parent_pid)
        answer_stack_queries(OURS.boot.run_dir, OURS.boot.slot)


def die_with(parent_pid: int) -> None:
    """See Note [No orphan]."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
