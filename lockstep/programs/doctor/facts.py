"""What is known about a machine, as one value. None: it could not be found out here."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Orphan:
    """A process of a run whose launcher is gone."""

    pid: int
    command: str


@dataclass(frozen=True)
class Facts:
    """Everything that the checks may ask for. `math.inf` stands for no limit."""

    num_workers: int

    # Software. `running` is lockstep's own version; `installed` has None for a distribution that is not there.
    python: tuple[int, ...]
    running: str
    installed: Mapping[str, str | None] = field(default_factory=dict)
    saving_error: str | None = None  # of a checkpoint that was written and read; empty if there was none

    # Cores that this process may run on, and how many of them a container lets it use on average.
    usable_cores: int | None = None
    core_quota: float | None = None
    threads: str | None = None  # OMP_NUM_THREADS as it is set
    architecture: str = "x86_64"

    # What the machine has free, and how much more the container (control group) lets its processes take.
    free_bytes: int | None = None
    group_limit_bytes: int | None = None
    group_left_bytes: int | None = None

    # /dev/shm, through which torch's loading processes hand over tensors, and memfd, which lockstep uses.
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    memfd: bool = True

    # What this process and its children may open and start.
    open_files_soft: float | None = None
    open_files_hard: float | None = None
    processes_left: float | None = None

    # The folder of runs, or the nearest one above it that exists.
    folder: str = "runs"
    disk_free_bytes: int | None = None
    writable: bool = True

    # What the host's own name resolves to. `resolving_s` is None if there was no answer within `waited_s`.
    host_name: str = ""
    addresses: tuple[str, ...] = ()
    resolving_s: float | None = None
    waited_s: float = 0.0
    interfaces: tuple[str, ...] | None = None
    gloo_interfaces: tuple[str, ...] = ()  # those that GLOO_SOCKET_IFNAME names
    loopback_works: bool | None = None

    # GPUs by name, the free memory of each, the version of CUDA that torch has, and whether MPS runs.
    gpus: tuple[str, ...] | None = None
    gpu_free_bytes: tuple[int, ...] | None = None
    torch_cuda: str | None = None
    mps: bool = False

    # What ended runs left behind.
    orphans: tuple[Orphan, ...] | None = None
    dead_runs: tuple[str, ...] | None = None
    partial_checkpoints: tuple[str, ...] = ()
    shared_files: tuple[str, ...] | None = None
    shared_files_bytes: int = 0

    @property
    def cores_worth(self) -> float | None:
        """How many cores' work can be done at a time."""
        return min((number for number in (self.usable_cores, self.core_quota) if number is not None), default=None)

    @property
    def left_bytes(self) -> int | None:
        """How much memory can still be taken."""
        known = (self.free_bytes, self.group_left_bytes)
        return min((number for number in known if number is not None), default=None)
