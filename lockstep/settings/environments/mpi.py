"""Workers started by an MPI launcher: Open MPI's mpirun, or the Hydra of MPICH and Intel MPI.

MPI itself is not used: its launcher only starts the processes and numbers them.
"""

from collections.abc import Mapping

from lockstep.errors import BadEnvironment
from lockstep.settings.environments.place import LOOPBACK, LaunchPlace, check_world
from lockstep.settings.environments.variables import derived_port, port, text, whole
from lockstep.world import World

OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# PMI_RANK alone is also set by `srun --mpi=pmi2`, which is Slurm's own start; MPI_LOCALRANKID is Hydra's.
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

# Open MPI 5 and 4, then the process managers that name their job. Plain Hydra names none.
JOB_NAMES = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
)


def place(environ: Mapping[str, str]) -> LaunchPlace | None:
    if OPEN_MPI[0] in environ:
        names = OPEN_MPI
    elif HYDRA[0] in environ and HYDRA[2] in environ:
        names = HYDRA
    else:
        return None
    rank, size, local_rank, local_size = (whole(environ, name) for name in names)
    world = check_world(World(rank, size, local_rank, local_size), names[0], names[1])
    return LaunchPlace("mpi", world, _address(environ, world), _port(environ, world))


def _address(environ: Mapping[str, str], world: World) -> str:
    if world.on_one_host:
        return LOOPBACK
    if not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        raise BadEnvironment(
            "MPI does not say where worker 0 runs, and the workers are on several hosts: set MASTER_ADDR to "
            "worker 0's host and MASTER_PORT to a free port there (mpirun -x MASTER_ADDR=... "
            "-x MASTER_PORT=...)"
        )
    return text(environ, "MASTER_ADDR")


def _port(environ: Mapping[str, str], world: World) -> int:
    if environ.get("MASTER_PORT"):
        return port(environ)
    for name in JOB_NAMES:
        if environ.get(name):
            return derived_port(f"mpi/{name}/{environ[name]}")
    raise BadEnvironment(
        f"no port is known at which the {world.size} workers can meet, because this MPI launcher does not "
        "name its job: set MASTER_PORT to a free port"
    )
