"""`lockstep run`: starts the workers of a job, follows them to their end, and reports once how they ended.

Decide (pure, tested without a process):
- `decisions`  what follows from an event: which worker is replaced, when all start again, when the run is over
- `hangs`      which worker is stopped, late or hung; `stragglers`: which is slow, and with what
- `events`     what the launcher does and sees, as values; `messages`: the texts for the user

Do:
- `launch`     runs a `job` to its end with a `supervisor`, which performs what was decided, and a `watchdog`
- `pool`       the seam: all that the supervisor and the watchdog need of the workers. `local_pool` is the variant of
  this host, made of `process`, `replacements`, `output` and `orphans`; `ray_pool` that of a `ray_cluster`, where
  each `ray_worker` holds a `hosted_worker`
- `worker`, `spare`  what the processes run; `identity` is which worker a process is; `load_once` and `fork`: how one
  is forked from another
- `status`, `failure`, `control`, `stacks`, `exits`   what workers and launcher show and say to each other
- `signals`, `process_stats`, `memory`, `control_groups`, `traceback_lines`, `folder`   what the launcher reads and
  keeps on this host
- `scale`      how another process reaches the launcher of a run
- `function`   `lockstep.launch(fn, ...)`: a function on workers, from a notebook; `call` is what these run

Nothing here imports torch, except a spare in its own process.

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
