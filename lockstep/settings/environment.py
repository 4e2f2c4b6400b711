"""What the environment says: the one module that reads os.environ.

Everything else is handed a mapping, or a value made from one here.
"""

import os
import platform
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import BadEnvironment
from lockstep.settings.environments import alone, kubernetes, lockstep_run, mpi, roster, slurm, torchrun
from lockstep.settings.environments.place import LaunchPlace
from lockstep.settings.environments.variables import optional
from lockstep.settings.faults import FAULT, Fault, parse_fault
from lockstep.settings.limits import MOST_LANES, MOST_SEED, MOST_THREADS, as_whole

__all__ = [
    "LaunchPlace",
    "Overrides",
    "find_place",
    "first_given",
    "kernel_variables",
    "make_secret",
    "nccl_host",
    "parse_assignment",
    "parse_device",
    "parse_strategy",
    "process_environment",
    "read_overrides",
    "read_secret",
    "take_environment",
    "with_variable",
]

# Note [Who is asked first]
# The launcher closest to the process wins. torchrun runs inside Slurm, and so does mpirun, whose helper
# daemons are themselves srun tasks: their numbers are true, and those of the Slurm step count the daemons.
_ENVIRONMENTS = (
    lockstep_run.place,
    torchrun.place,
    mpi.place,
    slurm.place,
    kubernetes.place,
    roster.place,
    alone.place,
)


SECRET = lockstep_run.SECRET
SECRET_FILE = "LOCKSTEP_SECRET_FILE"
ADDRESS = "LOCKSTEP_ADDRESS"


def process_environment() -> Mapping[str, str]:
    """The variables of this process, as they are now."""
    return dict(os.environ)


def take_environment(variables: Mapping[str, str]) -> None:
    """Sets variables of this process: for one that learns only after its start which worker it is."""
    os.environ.update(variables)


def drop_variables(*names: str) -> None:
    """Those that this process is not to hand on, and that do not hold for it."""
    for name in names:
        os.environ.pop(name, None)


_LOADED: dict[str, str] = {}
"""The variables when libraries were loaded, if that was before the script."""

READ_WHEN_LOADED = ("TORCH", "PYTORCH_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_")
"""How the names of variables begin that torch, or what is below it, may read when it is loaded."""


def note_loaded() -> None:
    """Libraries have been loaded with the variables of now, although the script has not begun."""
    _LOADED.update(os.environ)


def set_too_late(environ: Mapping[str, str]) -> list[str]:
    """Variables of libraries that the script has set after these were loaded; none where it loads them itself."""
    names = sorted(name for name in {*environ, *_LOADED} if name.startswith(READ_WHEN_LOADED))
    return [name for name in names if _LOADED and environ.get(name) != _LOADED.get(name)]


@contextmanager
def with_variable(name: str, value: str) -> Iterator[None]:
    """Inside, the variable is set: to `value`, unless the user has set it. Afterwards it is as it was."""
    is_ours = name not in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if is_ours:
            os.environ.pop(name, None)


def nccl_host(environ: Mapping[str, str]) -> str:
    """What NCCL takes this host for: its name, unless NCCL's own variable says otherwise."""
    return environ.get("NCCL_HOSTID", "").strip() or platform.node()


KERNEL_VARIABLES = (
    "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
"""By which libraries below torch are given other kernels, or another precision."""


def kernel_variables(environ: Mapping[str, str]) -> str:
    """Those that are set, as a text to compare."""
    return ", ".join(f"{name}={environ[name]}" for name in KERNEL_VARIABLES if name in environ) or "none"


STRATEGIES = ("replicated", "sharded:optimizer", "sharded:gradients", "sharded:parameters")
"""The strategies of a step, by their string forms."""


def find_place(environ: Mapping[str, str]) -> LaunchPlace:
    """The place that the launcher of this process gave it. See Note [Who is asked first]."""
    answers = (ask(environ) for ask in _ENVIRONMENTS)
    place = next(place for place in answers if place is not None)
    own_address = environ.get(ADDRESS, "").strip()
    place = replace(place, secret=read_secret(environ), own_address=own_address)
    where = environ.get(roster.ROSTER, "").strip()
    if not where or place.launcher == lockstep_run.LAUNCHER:  # it knows all its workers
        return place
    return replace(place, roster=where, world=replace(place.world, spans_hosts=True))


def make_secret() -> str:
    """A secret for a run whose user has given none."""
    return secrets.token_hex(32)


def read_secret(environ: Mapping[str, str]) -> bytes:
    """That of the run; empty if nobody has given one. See SECURITY.md.

    Spaces around it do not count: files end with a line's end.
    """
    given, path = environ.get(SECRET, "").strip(), environ.get(SECRET_FILE, "").strip()
    if given or not path:
        return given.encode()
    try:
        found = Path(path).read_bytes().strip()
    except OSError as error:
        raise BadEnvironment(f"{SECRET_FILE}={path} cannot be read: {error.strerror}") from error
    if not found:
        raise BadEnvironment(f"{SECRET_FILE}={path} is empty: it holds the secret of the run")
    return found


@dataclass(frozen=True)
class Overrides:
    """What the command line or a variable sets over the script's own settings; None where it sets nothing."""

    lanes: int | None = None
    seed: int | None = None
    threads: int | None = None
    usual_threads: int | None = None
    device: str | None = None
    strategy: str | None = None
    assignment: tuple[tuple[int, ...], ...] | None = None
    run_dir: Path | None = None
    rebalance: bool | None = None
    trail: bool | None = None
    """Whether a resumed run is compared with the one from whose checkpoint it goes on."""
    timeline: bool = False
    """Whether all steps are written to the run's timeline."""
    trace_dir: Path | None = None
    stop_after: int | None = None
    dump_path: Path | None = None
    fault: Fault | None = None
    """What shall happen to the run, on purpose."""
    status_fd: int | None = None
    control_fd: int | None = None
    resume: str | None = None
    """"auto", "never" or the path of a checkpoint."""
    checkpoints: Path | None = None
    checkpoint_every: str | None = None
    """As typed: "100 steps", "10 min" or both with a comma."""
    checkpoint_keep: int | None = None
    of_run: str = ""
    """The folder of a further run of the script, in that of the first one's checkpoints."""

    def for_run(self, number: int) -> "Overrides":
        """For a run before which the script has had so many others: it goes on from checkpoints of its own alone."""
        if number == 0:
            return self
        resume = self.resume if self.resume in (None, "never") else "auto"
        return replace(self, of_run=f"run-{number + 1}", resume=resume)

    @property
    def saves(self) -> bool:
        """Whether anything was set about checkpoints."""
        return any((self.resume, self.checkpoints, self.checkpoint_every, self.checkpoint_keep))

    @property
    def checkpoint_folder(self) -> Path | None:
        """The folder that was named, else the one beside the logs; None where there is no run folder either."""
        folder = self.checkpoints or (self.run_dir / "checkpoints" if self.run_dir else None)
        return None if folder is None else folder / self.of_run


def first_given(*values: Any) -> Any:
    """The first that is not None: what the command line sets goes before what the script says."""
    return next((value for value in values if value is not None), None)


def read_overrides(environ: Mapping[str, str]) -> Overrides:
    """The overrides of this process. `usual_threads` is OMP_NUM_THREADS: it only counts where nothing else is set."""
    return Overrides(
        lanes=optional(environ, "LOCKSTEP_LANES", at_least=1, at_most=MOST_LANES),
        seed=optional(environ, "LOCKSTEP_SEED", at_most=MOST_SEED),
        threads=optional(environ, "LOCKSTEP_THREADS", at_least=1, at_most=MOST_THREADS),
        usual_threads=_usual_threads(environ),
        device=_parsed(environ, "LOCKSTEP_DEVICE", parse_device),
        strategy=_parsed(environ, "LOCKSTEP_STRATEGY", parse_strategy),
        assignment=_assignment(environ),
        run_dir=_path(environ, "LOCKSTEP_RUN_DIR"),
        rebalance=_switch(environ, "LOCKSTEP_REBALANCE"),
        trail=_switch(environ, "LOCKSTEP_TRAIL"),
        timeline=bool(optional(environ, "LOCKSTEP_TIMELINE", at_most=1)),
        trace_dir=_path(environ, "LOCKSTEP_TRACE_DIR"),
        stop_after=optional(environ, "LOCKSTEP_STOP_AFTER"),
        dump_path=_path(environ, "LOCKSTEP_DUMP"),
        fault=_fault(environ),
        status_fd=optional(environ, lockstep_run.STATUS_FD),
        control_fd=optional(environ, lockstep_run.CONTROL_FD),
        resume=environ.get("LOCKSTEP_RESUME", "").strip() or None,
        checkpoints=_path(environ, "LOCKSTEP_CHECKPOINTS"),
        checkpoint_every=environ.get("LOCKSTEP_CHECKPOINT_EVERY", "").strip() or None,
        checkpoint_keep=optional(environ, "LOCKSTEP_CHECKPOINT_KEEP", at_least=1),
    )


def parse_assignment(text: str) -> tuple[tuple[int, ...], ...]:
    """The lanes of each worker: `"0,1;2,3,4"` gives worker 0 two and worker 1 three; a part may be empty."""
    workers = [[as_whole(lane) for lane in part.split(",")] if part.strip() else [] for part in text.split(";")]
    lanes_of = tuple(tuple(lane for lane in lanes if lane is not None and lane < MOST_LANES) for lanes in workers)
    if list(map(len, lanes_of)) != list(map(len, workers)):
        raise ValueError(f'{text[:60]!r} is not an assignment: it looks like "0,1;2,3,4", one part for each worker')
    return lanes_of


def parse_device(text: str) -> str:
    """The same text, known to name a device: `"cpu"`, `"cuda"` or `"cuda:1"`. Without torch."""
    if not isinstance(text, str) or not re.fullmatch(r"cpu|cuda|cuda:(0|[1-9][0-9]{0,3})", text):
        raise ValueError(
            f'must be "cpu", "cuda" (each worker its own GPU) or "cuda:0", "cuda:1" and so on (that GPU for all '
            f"workers), not {text!r}"
        )
    return text


def parse_strategy(text: str) -> str:
    """The same text, known to name a strategy of `lockstep.strategies`. Without torch."""
    if text not in STRATEGIES:
        raise ValueError(f"must be {' or '.join(map(repr, STRATEGIES))}, not {text[:60]!r}")
    return text


def _parsed(environ: Mapping[str, str], name: str, parse: Callable[[str], str]) -> str | None:
    text = environ.get(name, "").strip()
    try:
        return parse(text) if text else None
    except ValueError as error:
        raise BadEnvironment(f"{name} {error}") from None


def _assignment(environ: Mapping[str, str]) -> tuple[tuple[int, ...], ...] | None:
    text = environ.get("LOCKSTEP_ASSIGNMENT", "")
    try:
        return parse_assignment(text) if text else None
    except ValueError as error:
        raise BadEnvironment(f"LOCKSTEP_ASSIGNMENT cannot be used: {error}") from None


def _fault(environ: Mapping[str, str]) -> Fault | None:
    text = environ.get(FAULT, "")
    try:
        return parse_fault(text) if text else None
    except ValueError as error:
        raise BadEnvironment(f"{FAULT} cannot be used: {error}") from None


def _usual_threads(environ: Mapping[str, str]) -> int | None:
    # OpenMP allows one number for each level of nesting ("4,2"); the first is the one that torch uses.
    outermost = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return optional({"OMP_NUM_THREADS": outermost}, "OMP_NUM_THREADS", at_least=1, at_most=MOST_THREADS)


def _switch(environ: Mapping[str, str], name: str) -> bool | None:
    number = optional(environ, name, at_most=1)
    return None if number is None else bool(number)


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name, "")
    return Path(value) if value else None
