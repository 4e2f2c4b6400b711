"""What `TorchTrainer` takes as its `torch_config`, and what Ray Train calls because of it.

# Note [Replica groups]
# Ray Train restarts all workers when one is lost, unless the backend says that each worker is a replica group of its
# own: then it replaces the lost one alone, as lockstep wants it. The members go on meanwhile, and the replacement
# finds them by the roster.

# Note [A function, not a script]
# Ray Train calls the user's function in a thread of a process that goes on afterwards. So nobody's exit closes the run:
# `train_func_context` does. Signals cannot be handled in a thread, and Ray sends none before it kills a worker.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from lockstep.elastic.roster.ray_actor import make_actor
from lockstep.errors import BadArgument
from lockstep.launch.channels.exits import LEFT_OUT, OutOfPlace
from lockstep.launch.host.addresses import GLOO_INTERFACE, free_port, interface_of, is_loopback
from lockstep.run import active
from lockstep.settings.environment import ADDRESS, SECRET, make_secret, process_environment, take_environment
from lockstep.settings.environments.lockstep_run import SLOT
from lockstep.settings.environments.roster import ROSTER


@dataclass
class LockstepConfig(BackendConfig):
    """The workers of a `TorchTrainer` form a lockstep run, which its function starts with `lockstep.start()`.

    A lost worker is replaced while the others go on. `checkpoints` is a folder that all nodes share, `checkpoint_every`
    how often the run is saved there ("100 steps", "10 min"), and `resume` where it begins ("auto", "never" or the path
    of a checkpoint). When all workers are lost at once, Ray Train starts all again, and the run goes on from there.
    `variables` are others that lockstep reads, such as `LOCKSTEP_SEED`.
    """

    checkpoints: str | None = None
    checkpoint_every: str | None = None
    resume: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    backend: str = "lockstep"
    """`TorchTrainer` reads this, and chooses for itself where it is empty."""

    def __post_init__(self) -> None:
        wrong = [name for name in self.variables if not name.startswith("LOCKSTEP_")]
        if wrong:
            raise BadArgument(
                f"LockstepConfig(variables=...) takes those of lockstep, not {wrong[0]}: give it to Ray, by "
                "RunConfig(worker_runtime_env={'env_vars': ...})"
            )

    @property
    def backend_cls(self) -> type["LockstepBackend"]:
        return LockstepBackend

    @property
    def train_func_context(self) -> Any:
        return closing_the_run

    def settings(self, is_restart: bool) -> dict[str, str]:
        """The variables of every worker. After a restart, the newest checkpoint is where the run goes on."""
        resume = "auto" if is_restart and self.checkpoints is not None else self.resume
        values = {
            "LOCKSTEP_CHECKPOINTS": self.checkpoints,
            "LOCKSTEP_CHECKPOINT_EVERY": self.checkpoint_every,
            "LOCKSTEP_RESUME": resume,
        }
        return {**self.variables, **{name: value for name, value in values.items() if value is not None}}


class LockstepBackend(Backend):
    """What Ray Train's controller calls. See Note [Replica groups]."""

    has_replica_groups = True

    def __init__(self) -> None:
        super().__init__()
        self._founding: dict[str, str] = {}
        self._num_founded = 0
        self._roster: Any = None
        """The roster's actor, which ends with this object."""

    def on_start(self, worker_group: Any, backend_config: LockstepConfig) -> None:
        """Gives each worker its variables: all that found the run, or one that replaces a lost worker."""
        workers = worker_group.get_workers()
        ranks = [worker.distributed_context.world_rank for worker in workers]
        size = workers[0].distributed_context.world_size
        if len(workers) == size:
            self._found(workers)
        addresses = [worker.metadata.node_ip for worker in workers]
        settings = {**backend_config.settings(self._num_founded > 1), **self._founding}
        given = [
            {**settings, **place(rank, size, addresses[:at].count(address), addresses.count(address))}
            for at, (rank, address) in enumerate(zip(ranks, addresses, strict=True))
        ]
        ray.get(
            [
                worker.execute_async(prepare, worker.metadata.node_ip, variables)
                for worker, variables in zip(workers, given, strict=True)
            ]
        )

    def _found(self, workers: Any) -> None:
        """A roster of its own for each founding: an earlier one tells of workers that are gone."""
        self._num_founded += 1
        first = min(workers, key=lambda worker: worker.distributed_context.world_rank)
        port = ray.get(first.execute_async(free_port))
        name = f"train-{secrets.token_hex(8)}"
        self._roster = make_actor(name, lifetime=None)
        self._founding = {
            "MASTER_ADDR": first.metadata.node_ip,
            "MASTER_PORT": str(port),
            ROSTER: f"ray://{name}",
            SECRET: make_secret(),
        }


def prepare(address: str, variables: Mapping[str, str]) -> None:
    """On a worker: sets its variables, and the interface that Gloo takes unless the user has said so."""
    interface = interface_of(address)
    chosen = {GLOO_INTERFACE: interface} if interface and GLOO_INTERFACE not in process_environment() else {}
    take_environment({**chosen, ADDRESS: "" if is_loopback(address) else address, **variables})


def place(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Which worker it is. Ray Train itself says of a replica group that it is alone on its host."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    return {**{name: str(number) for name, number in numbers.items()}, SLOT: str(rank)}


@contextmanager
def closing_the_run() -> Iterator[None]:
    """The user's function runs inside. Afterwards the run is closed. See Note [A function, not a script].

    A worker that was left out by the others fails, so that Ray Train replaces it. One that came too late, or whose
    script was not where the others' are, returns: its failure would end the others.
    """
    try:
        yield
    except SystemExit as end:
        _close(failed=True)
        if end.code == LEFT_OUT:
            raise RuntimeError("the other workers went on without this one: it is to be replaced") from end
        if end.code not in (0, None) and not isinstance(end, OutOfPlace):
            raise RuntimeError(f"the function called sys.exit({end.code!r})") from end
        if isinstance(end, OutOfPlace):
            print(f"! this worker gives its place up: {end}", flush=True)
    except BaseException:
        _close(failed=True)
        raise
    else:
        _close(failed=False)


def _close(failed: bool) -> None:
    run = active.current()
    if run is not None:
        run.failed = run.failed or failed
        run.close()
