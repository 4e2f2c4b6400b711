"""Workers started by `lockstep run`: what the launcher writes down for them, and how they read it back.

Both sides stand here, so that a name is spelled once. RANK, WORLD_SIZE and the like are set as well, for user
code that reads them: MASTER_PORT is free, so that a script may open a process group of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.run.environments.place import LOOPBACK, Place, check_world
from lockstep.run.environments.variables import optional, port, text, whole
from lockstep.world import World

MARK = "LOCKSTEP_LAUNCHER"
PARENT_PID = "LOCKSTEP_PARENT_PID"
RUN_DIR = "LOCKSTEP_RUN_DIR"
NOTICE_FD = "LOCKSTEP_NOTICE_FD"
LISTEN_FD = "LOCKSTEP_LISTEN_FD"
PORT = "LOCKSTEP_PORT"


@dataclass(frozen=True)
class Bootstrap:
    """What a worker needs to know before the user's script runs."""

    rank: int
    parent_pid: int
    run_dir: Path
    notice_fd: int
    listen_fd: int | None


def variables(boot: Bootstrap, num_workers: int, port: int, free_port: int) -> dict[str, str]:
    """The variables that tell a worker all of `boot`, where worker 0 listens, and a port for the user's own use."""
    written = {
        MARK: "lockstep run",
        PARENT_PID: str(boot.parent_pid),
        RUN_DIR: str(boot.run_dir),
        NOTICE_FD: str(boot.notice_fd),
        "RANK": str(boot.rank),
        "LOCAL_RANK": str(boot.rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port),
        PORT: str(port),
    }
    return written if boot.listen_fd is None else {**written, LISTEN_FD: str(boot.listen_fd)}


def bootstrap(environ: Mapping[str, str]) -> Bootstrap | None:
    """What `variables` wrote, or None in a process that `lockstep run` did not start."""
    if MARK not in environ:
        return None
    return Bootstrap(
        rank=whole(environ, "RANK"),
        parent_pid=whole(environ, PARENT_PID),
        run_dir=Path(text(environ, RUN_DIR)),
        notice_fd=whole(environ, NOTICE_FD),
        listen_fd=optional(environ, LISTEN_FD),
    )


def place(environ: Mapping[str, str]) -> Place | None:
    if MARK not in environ:
        return None
    rank, size = whole(environ, "RANK"), whole(environ, "WORLD_SIZE", at_least=1)
    world = check_world(World(rank, size, rank, size), "RANK", "WORLD_SIZE")
    return Place("lockstep run", world, LOOPBACK, port(environ, PORT), listen_fd=optional(environ, LISTEN_FD))
