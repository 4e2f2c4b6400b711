"""Messages by torch's MPI backend, for a torch that was built with it."""

from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.errors import BadEnvironment
from lockstep.wire.network.process_group import ProcessGroupTransport
from lockstep.world import World


class Mpi(ProcessGroupTransport):
    """A Transport over MPI. The workers must have been started by mpirun, one process for each rank.

    MPI brings its own way to meet and knows no limit of time: `timeout_s` is not used. Most MPIs end all processes when
    one dies, so a lost peer is seldom told as PeerGone.
    """

    def __init__(self, world: World, store: Store, timeout_s: float) -> None:
        if not dist.is_mpi_available():
            raise BadEnvironment("this torch was built without MPI: build torch from source with MPI, or use Gloo")
        group = dist.ProcessGroupMPI.create(list(range(world.size)))
        _check_same(world, group)
        super().__init__(world, group, store)

    def _end(self, group: Any) -> None:
        pass  # MPI has nothing to abort for one group; it ends with the process


def _check_same(world: World, group: Any) -> None:
    found = "no place" if group is None else f"rank {group.rank()} of {group.size()}"
    if found != f"rank {world.rank} of {world.size}":
        raise BadEnvironment(
            f"MPI gives this process {found}, but it is worker {world.rank} of {world.size}: start all workers with "
            "one mpirun, or use Gloo"
        )
