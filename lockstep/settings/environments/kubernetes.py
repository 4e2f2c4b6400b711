"""Workers that are pods: one process in each, with nobody between Kubernetes and it.

Kubeflow Trainer gives a pod the variables that its torchrun would read (`PET_...`); a plain Indexed Job gives it
`JOB_COMPLETION_INDEX` only, and the manifest must say how many there are. Where torchrun stands between, it sets RANK,
and is asked first.
"""

from collections.abc import Mapping

from lockstep.errors import BadEnvironment
from lockstep.settings.environments.lockstep_run import SLOT
from lockstep.settings.environments.place import LOOPBACK, LaunchPlace, check_world
from lockstep.settings.environments.roster import ROSTER
from lockstep.settings.environments.variables import optional, port, text, whole
from lockstep.world import World

INDEX = "JOB_COMPLETION_INDEX"
NUM_WORKERS = "LOCKSTEP_WORKERS"
USUAL_PORT = 29_500
"""In a pod with an address of its own nobody else listens."""


def place(environ: Mapping[str, str]) -> LaunchPlace | None:
    """An Indexed Job whose pods know nothing of each other is many trainings, each alone."""
    if environ.get("PET_NODE_RANK") and environ.get("PET_NNODES"):
        return _trainer(environ)
    if environ.get(INDEX) and (environ.get(NUM_WORKERS) or environ.get(ROSTER)):
        return _indexed(environ)
    return None


def _trainer(environ: Mapping[str, str]) -> LaunchPlace:
    size, rank = _num_nodes(environ), whole(environ, "PET_NODE_RANK")
    if environ.get("PET_NPROC_PER_NODE", "1").strip() not in ("", "1"):
        raise BadEnvironment(
            f"PET_NPROC_PER_NODE={environ['PET_NPROC_PER_NODE'][:60]} asks for more than one worker on each node, and "
            "nobody starts them: set numProcPerNode to 1, or start the script by torchrun"
        )
    world = check_world(World(rank, size, 0, 1), "PET_NODE_RANK", "PET_NNODES")
    if size == 1:
        return LaunchPlace("kubernetes", world, LOOPBACK, 0, slot=_slot(environ, rank))
    return LaunchPlace(
        "kubernetes",
        world,
        text(environ, "PET_MASTER_ADDR"),
        port(environ, "PET_MASTER_PORT"),
        slot=_slot(environ, rank),
    )


def _num_nodes(environ: Mapping[str, str]) -> int:
    if ":" in environ["PET_NNODES"]:
        raise BadEnvironment(
            f"PET_NNODES={environ['PET_NNODES'][:60]} is a range, which only torchrun understands: set numNodes to one "
            f"number. For workers that come and go set {ROSTER} instead"
        )
    return whole(environ, "PET_NNODES", at_least=1)


def _indexed(environ: Mapping[str, str]) -> LaunchPlace:
    index, size = whole(environ, INDEX), optional(environ, NUM_WORKERS, at_least=1)
    slot = _slot(environ, index)
    if size is None:
        return LaunchPlace("kubernetes", World(), LOOPBACK, 0, slot=slot)
    if index >= size:
        raise BadEnvironment(
            f"{INDEX}={index} contradicts {NUM_WORKERS}={size}: set {NUM_WORKERS} to the completions of the Job"
        )
    if size == 1:
        return LaunchPlace("kubernetes", World(), LOOPBACK, 0, slot=slot)
    return LaunchPlace("kubernetes", World(index, size, 0, 1), _address(environ), _port(environ), slot=slot)


def _address(environ: Mapping[str, str]) -> str:
    if not environ.get("MASTER_ADDR", "").strip():
        raise BadEnvironment(
            "an Indexed Job does not say where its pod of index 0 is: set MASTER_ADDR to <job>-0.<service>, where the "
            "service is the headless one that the pods name as their subdomain"
        )
    return text(environ, "MASTER_ADDR")


def _port(environ: Mapping[str, str]) -> int:
    return port(environ) if environ.get("MASTER_PORT", "").strip() else USUAL_PORT


def _slot(environ: Mapping[str, str], number: int) -> int | None:
    """Of a worker that may come later; the user's own word goes first."""
    if not environ.get(ROSTER):
        return None
    given = optional(environ, SLOT)
    return number if given is None else given
