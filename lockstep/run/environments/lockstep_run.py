"""Workers started by `lockstep run`: what the launcher writes down for them, and how they read it back.

Both sides stand here, so that a name is spelled once. RANK, WORLD_SIZE and the like are set as well, for user
code that reads them: MASTER_PORT is free, so that a script may open a process group of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import BadEnvironment
from lockstep.run.environments.place import LOOPBACK, Place, check_world
from lockstep.run.environments.variables import optional, port, text, whole
from lockstep.world import World

MARK = "LOCKSTEP_LAUNCHER"
PARENT_PID = "LOCKSTEP_PARENT_PID"
RUN_DIR = "LOCKSTEP_RUN_DIR"
NOTICE_FD = "LOCKSTEP_NOTICE_FD"
LISTEN_FD = "LOCKSTEP_LISTEN_FD"
PORT = "LOCKSTEP_PORT"
SLOT = "LOCKSTEP_SLOT"
STATUS_FD = "LOCKSTEP_STATUS_FD"
DOORS = "LOCKSTEP_DOORS"

Doors = tuple[tuple[int, int], ...]
"""The slot and the port of each member that a new worker may ask to be admitted."""


@dataclass(frozen=True)
class Bootstrap:
    """What a worker needs to know before the user's script runs. A founder of the run has no `doors`."""

    rank: int
    parent_pid: int
    run_dir: Path
    notice_fd: int
    listen_fd: int | None
    status_fd: int | None = None
    doors: Doors = ()

    @property
    def slot(self) -> int:
        """The number under which the worker was launched: also what a joiner calls its rank until it is admitted."""
        return self.rank


def variables(boot: Bootstrap, num_workers: int, port: int, free_port: int) -> dict[str, str]:
    """The variables that tell a worker all of `boot`, where worker 0 listens, and a port for the user's own use."""
    num_workers = max(num_workers, boot.slot + 1)
    optional_ones = {LISTEN_FD: boot.listen_fd, STATUS_FD: boot.status_fd, DOORS: write_doors(boot.doors) or None}
    return {
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
        SLOT: str(boot.slot),
        **{name: str(value) for name, value in optional_ones.items() if value is not None},
    }


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
        status_fd=optional(environ, STATUS_FD),
        doors=read_doors(environ.get(DOORS, "")),
    )


def write_doors(doors: Doors) -> str:
    """The text that `read_doors` reads back."""
    return ",".join(f"{slot}:{port}" for slot, port in doors)


def read_doors(text: str) -> Doors:
    """The doors in `"0:41001,2:41007"`, which are worker 0's and worker 2's."""
    found = [word.strip().partition(":") for word in text.split(",") if word.strip()]
    if not all(slot.isdecimal() and door.isdecimal() for slot, _, door in found):
        raise BadEnvironment(f"{DOORS}={text} cannot be used: it looks like 0:41001,2:41007")
    return tuple((int(slot), int(door)) for slot, _, door in found)


def place(environ: Mapping[str, str]) -> Place | None:
    if MARK not in environ:
        return None
    rank, size = whole(environ, "RANK"), whole(environ, "WORLD_SIZE", at_least=1)
    world = check_world(World(rank, size, rank, size), "RANK", "WORLD_SIZE")
    return Place(
        launcher="lockstep run",
        world=world,
        address=LOOPBACK,
        port=port(environ, PORT),
        listen_fd=optional(environ, LISTEN_FD),
        slot=optional(environ, SLOT),
        doors=read_doors(environ.get(DOORS, "")),
    )
