"""A spare: a process that has loaded what takes long, and waits until it becomes a worker.

    python -m lockstep.launch.worker.spare FD site.py [arguments]

It reads the variables of that worker, as JSON, from the pipe FD. From then on it is a worker like any other.
"""

import json
import os
import signal
import sys

from lockstep.launch.worker import __main__ as worker
from lockstep.launch.worker.identity import die_with
from lockstep.launch.worker.load_once import load
from lockstep.settings.environment import process_environment, take_environment
from lockstep.settings.environments.lockstep_run import PARENT_PID


def main() -> None:
    """Waits for the worker's variables, and runs it. If the launcher closes the pipe without any, returns."""
    die_with(int(process_environment()[PARENT_PID]))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    part_fd = int(sys.argv.pop(1))
    load()
    with os.fdopen(part_fd, "rb") as pipe:
        part = pipe.read()
    if part:
        take_environment(json.loads(part))
        worker.main()


if __name__ == "__main__":
    main()
