"""`lockstep run`: starts the workers of a job, follows them to their end, and reports once how they ended.

What others use:
- `launch`       runs a `job` to its end: opens a pool, and lets a supervisor follow its workers
- `function`     `lockstep.launch(fn, ...)`: a function on workers, from a notebook; `call` is what these run
- `pool`         the seam: all that the supervisor asks of workers
- `events`       what the launcher does and sees, as values
- `scale`        how another process finds the launcher of a run and sets its number of workers

The rooms inside:
- `supervision/` decides and reports: what follows from a loss, who hangs or is slow, the sentences about it
- `pools/`       start, follow and end workers: the variants of the seam, on this host and on a Ray cluster
- `worker/`      what runs inside of a worker's process
- `channels/`    what workers and launcher tell each other: status page, requests for copies, exit codes, failures
- `host/`        what this host says and keeps: processes, memory, signals, addresses, the folder of a run

Nothing here imports torch, except a worker that loads it before its script.

# Note [A room that can be called]
# `lockstep.launch` is this room and the function of that name: the module can be called.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class LaunchRoom(ModuleType):
    """See Note [A room that can be called]."""

    def __call__(self, fn: Callable[..., Any], *args: Any, n: int = 1, **options: Any) -> Any:
        """Calls `fn(*args)` on `n` workers; gives what it returned on worker 0. See `function.launch_function`."""
        from lockstep.launch.function import launch_function

        return launch_function(fn, *args, n=n, **options)


sys.modules[__name__].__class__ = LaunchRoom
