"""Workers started by `lockstep run`: what the launcher writes down for them, and how they read it back.

Both sides stand here, so that a name is spelled once. RANK, WORLD_SIZE and the like mean to many scripts that torchrun
has started them, so they are only set where the user wants a process group of torch.distributed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import BadEnvironment
from lockstep.settings.environments.place import LOOPBACK, LaunchPlace, check_world
from lockstep.settings.environments.variables import optional, port, text, whole
from lockstep.world import World

LAUNCHER = "lockstep run"
MARK = "LOCKSTEP_LAUNCHER"
RANK = "LOCKSTEP_RANK"
SIZE = "LOCKSTEP_SIZE"
PARENT_PID = "LOCKSTEP_PARENT_PID"
RUN_DIR = "LOCKSTEP_RUN_DIR"
NOTICE_FD = "LOCKSTEP_NOTICE_FD"
LISTEN_FD = "LOCKSTEP_LISTEN_FD"
PORT = "LOCKSTEP_PORT"
SLOT = "LOCKSTEP_SLOT"
STATUS_FD = "LOCKSTEP_STATUS_FD"
ENDPOINTS = "LOCKSTEP_ENDPOINTS"
SECRET = "LOCKSTEP_SECRET"
CONTROL_FD = "LOCKSTEP_CONTROL_FD"

TORCH_DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What `torch.distributed.init_process_group` reads."""

_ENDPOINT = re.compile(r"[\w.-]+:\d{1,5}")


@dataclass(frozen=True)
class Bootstrap:
    """What a worker needs to know before the user's script runs. A founder of the run has no `endpoints`,
    which are those of the members that a new worker may ask to be admitted.

    `slot` is the number under which it was launched; a joiner calls it its rank until it is admitted.
    """

    slot: int
    parent_pid: int
    run_dir: Path
    notice_fd: int
    listen_fd: int | None
    status_fd: int | None = None
    endpoints: tuple[str, ...] = ()
    secret: str = field(default="", repr=False)


def variables(boot: Bootstrap, num_workers: int, port: int) -> dict[str, str]:
    """The variables that give a worker all of `boot`, how many there are, and where worker 0 listens."""
    endpoints = ",".join(boot.endpoints) or None
    optional_ones = {LISTEN_FD: boot.listen_fd, STATUS_FD: boot.status_fd, ENDPOINTS: endpoints}
    return {
        MARK: LAUNCHER,
        SECRET: boot.secret,
        PARENT_PID: str(boot.parent_pid),
        RUN_DIR: str(boot.run_dir),
        NOTICE_FD: str(boot.notice_fd),
        RANK: str(boot.slot),
        SIZE: str(_size(boot, num_workers)),
        PORT: str(port),
        SLOT: str(boot.slot),
        **{name: str(value) for name, value in optional_ones.items() if value is not None},
    }


def torch_distributed(boot: Bootstrap, num_workers: int, free_port: int) -> dict[str, str]:
    """What a script needs that opens a process group of torch.distributed itself, at a port that nobody uses."""
    rank, size = str(boot.slot), str(_size(boot, num_workers))
    return dict(zip(TORCH_DISTRIBUTED, (rank, rank, size, size, LOOPBACK, str(free_port)), strict=True))


def _size(boot: Bootstrap, num_workers: int) -> int:
    """A joiner counts itself in."""
    return max(num_workers, boot.slot + 1)


def bootstrap(environ: Mapping[str, str]) -> Bootstrap | None:
    """What `variables` wrote, or None in a process that `lockstep run` did not start."""
    if MARK not in environ:
        return None
    return Bootstrap(
        slot=whole(environ, RANK),
        parent_pid=whole(environ, PARENT_PID),
        run_dir=Path(text(environ, RUN_DIR)),
        notice_fd=whole(environ, NOTICE_FD),
        listen_fd=optional(environ, LISTEN_FD),
        status_fd=optional(environ, STATUS_FD),
        endpoints=_read_endpoints(environ),
        secret=environ.get(SECRET, ""),
    )


def _read_endpoints(environ: Mapping[str, str]) -> tuple[str, ...]:
    written = environ.get(ENDPOINTS, "")
    addresses = tuple(word.strip() for word in written.split(",") if word.strip())
    if not all(_ENDPOINT.fullmatch(address) for address in addresses):
        raise BadEnvironment(f"{ENDPOINTS}={written} cannot be used: it looks like 127.0.0.1:41001,127.0.0.1:41007")
    return addresses


def place(environ: Mapping[str, str]) -> LaunchPlace | None:
    if MARK not in environ:
        return None
    rank, size = whole(environ, RANK), whole(environ, SIZE, at_least=1)
    world = check_world(World(rank, size, rank, size), RANK, SIZE)
    return LaunchPlace(
        launcher=LAUNCHER,
        world=world,
        address=LOOPBACK,
        port=port(environ, PORT),
        listen_fd=optional(environ, LISTEN_FD),
        slot=optional(environ, SLOT),
        endpoints=_read_endpoints(environ),
    )
