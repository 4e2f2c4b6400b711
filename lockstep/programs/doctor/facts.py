"""What is known about a machine, as one value. None: it could not be found out here."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cores:
    """Cores that this process may run on, and how many of them a container lets it use on average."""

    usable: int | None = None
    quota: float | None = None

    @property
    def worth(self) -> float | None:
        """How many cores' work can be done at a time."""
        return min((number for number in (self.usable, self.quota) if number is not None), default=None)


@dataclass(frozen=True)
class MemoryFacts:
    """What the machine has free, and how much more the container (control group) lets its processes take."""

    free_bytes: int | None = None
    group_limit_bytes: int | None = None
    group_left_bytes: int | None = None

    @property
    def left_bytes(self) -> int | None:
        known = (self.free_bytes, self.group_left_bytes)
        return min((number for number in known if number is not None), default=None)


@dataclass(frozen=True)
class SharedMemoryFacts:
    """/dev/shm, through which torch's loading processes hand over tensors, and memfd, which lockstep uses."""

    size_bytes: int | None = None
    free_bytes: int | None = None
    memfd: bool = True


@dataclass(frozen=True)
class Limits:
    """What this process and its children may open and start; `math.inf` for no limit."""

    open_files_soft: float | None = None
    open_files_hard: float | None = None
    processes_left: float | None = None


@dataclass(frozen=True)
class HostName:
    """What the host's own name resolves to. `took_s` is None if there was no answer in time."""

    name: str
    addresses: tuple[str, ...] = ()
    took_s: float | None = None
    waited_s: float = 0.0


@dataclass(frozen=True)
class Network:
    interfaces: tuple[str, ...] | None = None
    loopback_works: bool | None = None
    gloo_interfaces: tuple[str, ...] = ()
    """Those that GLOO_SOCKET_IFNAME names."""


@dataclass(frozen=True)
class Software:
    """Versions as they are installed: None for a distribution that is not there. `running` is lockstep's own."""

    python: tuple[int, ...]
    running: str
    installed: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Disk:
    """The folder of runs, or the nearest one above it that exists."""

    folder: str
    free_bytes: int | None = None
    writable: bool = True


@dataclass(frozen=True)
class Gpus:
    """GPUs by name, the free memory of each, the version of CUDA that torch has, and whether MPS runs."""

    names: tuple[str, ...] | None = None
    free_bytes: tuple[int, ...] | None = None
    torch_cuda: str | None = None
    mps: bool = False


@dataclass(frozen=True)
class Orphan:
    """A process of a run whose launcher is gone."""

    pid: int
    launcher_pid: int
    command: str


@dataclass(frozen=True)
class Leftovers:
    """What ended runs left behind, as paths and processes."""

    orphans: tuple[Orphan, ...] | None = None
    dead_runs: tuple[str, ...] | None = None
    partial_checkpoints: tuple[str, ...] = ()
    shared_files: tuple[str, ...] | None = None
    shared_files_bytes: int = 0


@dataclass(frozen=True)
class Facts:
    """Everything that the checks may ask for."""

    num_workers: int
    software: Software
    host_name: HostName
    disk: Disk
    cores: Cores = Cores()
    memory: MemoryFacts = MemoryFacts()
    shared_memory: SharedMemoryFacts = SharedMemoryFacts()
    limits: Limits = Limits()
    network: Network = Network()
    threads: str | None = None
    """OMP_NUM_THREADS as it is set."""
    architecture: str = "x86_64"
    leftovers: Leftovers = Leftovers()
    saving_error: str | None = None
    """The error of a checkpoint that was written and read; empty if there was none."""
    gpus: Gpus = Gpus()
