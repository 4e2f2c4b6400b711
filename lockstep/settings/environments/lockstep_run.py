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
FORKS = "LOCKSTEP_FORKS"
"""How many workers the first one forks. See Note [Loaded once] in launch/worker/load_once.py."""
MASTER_ADDR = "LOCKSTEP_MASTER_ADDR"
LOCAL_RANK = "LOCKSTEP_LOCAL_RANK"
LOCAL_SIZE = "LOCKSTEP_LOCAL_SIZE"

TORCH_DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What `torch.distributed.init_process_group` reads."""

_ENDPOINT = re.compile(r"[\w.-]+:\d{1,5}")


@dataclass(frozen=True)
class Bootstrap:
    """What a worker needs to know before the user's script runs. A founder of the run has no `endpoints`,
    which are those of the members that a new worker may ask to be admitted.

    `slot` is the number under which it was launched; a joiner calls it its rank until it is admitted. On several hosts,
    worker 0 listens at `address`, and `local_rank` counts the workers of a host; None: all are on this host.
    """

    slot: int
    parent_pid: int
    run_dir: Path
    notice_fd: int
    listen_fd: int | None
    status_fd: int | None = None
    endpoints: tuple[str, ...] = ()
    secret: str = field(default="", repr=False)
    address: str = LOOPBACK
    local_rank: int | None = None
    local_size: int | None = None


def variables(boot: Bootstrap, num_workers: int, port: int) -> dict[str, str]:
    """The variables that give a worker all of `boot`, how many there are, and where worker 0 listens."""
    optional_ones = {
        LISTEN_FD: boot.listen_fd,
        STATUS_FD: boot.status_fd,
        ENDPOINTS: ",".join(boot.endpoints) or None,
        MASTER_ADDR: None if boot.address == LOOPBACK else boot.address,
        LOCAL_RANK: boot.local_rank,
        LOCAL_SIZE: boot.local_size,
    }
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
    rank, size = boot.slot, _size(boot, num_workers)
    local_rank = rank if boot.local_rank is None else boot.local_rank
    local_size = size if boot.local_size is None else boot.local_size
    values = (rank, local_rank, size, local_size, boot.address, free_port)
    return dict(zip(TORCH_DISTRIBUTED, map(str, values), strict=True))


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
    local_rank, local_size = optional(environ, LOCAL_RANK), optional(environ, LOCAL_SIZE, at_least=1)
    if local_rank is None or local_size is None:
        local_rank, local_size = rank, size
    master_addr = environ.get(MASTER_ADDR, "").strip()
    world = World(rank, size, local_rank, local_size, spans_hosts=bool(master_addr))
    return LaunchPlace(
        launcher=LAUNCHER,
        world=check_world(world, RANK, SIZE),
        address=master_addr or LOOPBACK,
        port=port(environ, PORT),
        listen_fd=optional(environ, LISTEN_FD),
        slot=optional(environ, SLOT),
        endpoints=_read_endpoints(environ),
    )
