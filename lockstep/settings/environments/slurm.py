"""Workers started by Slurm's srun, one task each.

# Note [A step, not a job]
# A batch script also sees SLURM_PROCID=0 and SLURM_NTASKS=4, yet it is one process that would wait for three
# that nobody started. Only srun sets SLURM_STEP_NUM_TASKS, so that is the sign of a task.

# Note [One job per worker]
# With a roster a job may be one worker, or a few: workers come when their job starts, and leave when it is preempted.
# The tasks of an array are such jobs, and the number of a task says which worker it is. Without a roster an array is
# many trainings.
"""

import re
from collections.abc import Mapping

from lockstep.errors import BadEnvironment
from lockstep.settings.environments.lockstep_run import SLOT
from lockstep.settings.environments.place import LOOPBACK, LaunchPlace, check_world
from lockstep.settings.environments.roster import ROSTER
from lockstep.settings.environments.variables import derived_port, optional, port, text, whole
from lockstep.settings.limits import as_whole
from lockstep.world import World

_MOST_HOSTS = 10**6
_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")


def place(environ: Mapping[str, str]) -> LaunchPlace | None:
    """See Note [A step, not a job]. A step of one task is an ordinary process (an interactive shell, say), unless it is
    one worker of many: see Note [One job per worker]."""
    if "SLURM_PROCID" not in environ:
        return None
    if (optional(environ, "SLURM_STEP_NUM_TASKS") or 1) < 2:
        slot = _slot(environ, World())
        return None if slot is None else LaunchPlace("slurm", World(), LOOPBACK, 0, slot=slot)
    world = check_world(_world(environ), "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    return LaunchPlace("slurm", world, _address(environ, world), _port(environ), slot=_slot(environ, world))


def _slot(environ: Mapping[str, str], world: World) -> int | None:
    """The number of a worker that may come later; None where nobody can. What the user has set goes first."""
    if not environ.get(ROSTER):
        return None
    given, task = optional(environ, SLOT), optional(environ, "SLURM_ARRAY_TASK_ID")
    if given is not None and world.size == 1:
        return given
    if given is not None:
        raise BadEnvironment(
            f"{SLOT}={given} would be the number of all {world.size} tasks of this step: unset it, and each "
            "takes its SLURM_PROCID"
        )
    if task is None:
        return world.rank if world.size > 1 else None
    first = whole(environ, "SLURM_ARRAY_TASK_MIN")
    if task < first:
        raise BadEnvironment(
            f"SLURM_ARRAY_TASK_ID={task} contradicts SLURM_ARRAY_TASK_MIN={first}: leave both as Slurm "
            f"has set them, or set {SLOT}"
        )
    return (task - first) * world.size + world.rank


def expand_counts(counts: str) -> tuple[int, ...]:
    """The tasks on each host: `"2(x3),1"` is `(2, 2, 2, 1)`."""
    numbers: list[int] = []
    for entry in counts.split(","):
        match = _COUNT.fullmatch(entry.strip())
        if match is None:
            raise BadEnvironment(f"SLURM_STEP_TASKS_PER_NODE={counts} cannot be read: it looks like 2(x3),1")
        numbers += [int(match[1])] * int(match[2] or 1)
    return tuple(numbers)


def expand_hosts(hosts: str) -> tuple[str, ...]:
    """The hosts of a list: `"node[01-03,07],login1"` is node01, node02, node03, node07, login1."""
    entries = [entry.strip() for entry in _ENTRY.findall(hosts)]
    names = tuple(name for entry in entries for name in _expand_entry(entry, hosts))
    if ",".join(entries) != hosts.replace(" ", "") or not all(names) or not names:
        raise _unreadable(hosts)
    return names


def _expand_entry(entry: str, hosts: str) -> list[str]:
    head, bracket, rest = entry.partition("[")
    if not bracket:
        return [entry]
    ranges, _, tail = rest.partition("]")
    return [
        head + number + name
        for part in ranges.split(",")
        for number in _expand_range(part, hosts)
        for name in _expand_entry(tail, hosts)
    ]


def _expand_range(part: str, hosts: str) -> list[str]:
    first, _, last = part.strip().partition("-")
    last = last or first
    low, high = as_whole(first), as_whole(last)
    if low is None or high is None or not low <= high < low + _MOST_HOSTS:
        raise _unreadable(hosts)
    return [str(number).zfill(len(first)) for number in range(low, high + 1)]


def _unreadable(hosts: str) -> BadEnvironment:
    return BadEnvironment(f"SLURM_STEP_NODELIST={hosts} cannot be read: it looks like node[01-03,07],login1")


def _world(environ: Mapping[str, str]) -> World:
    size = whole(environ, "SLURM_STEP_NUM_TASKS")
    counts = _counts(environ, size)
    if sum(counts) != size:
        raise BadEnvironment(
            f"SLURM_STEP_TASKS_PER_NODE gives {sum(counts)} tasks, but SLURM_STEP_NUM_TASKS={size}: "
            "start the workers with one srun"
        )
    node = 0 if len(counts) == 1 else whole(environ, "SLURM_NODEID")
    if node >= len(counts):
        raise BadEnvironment(f"SLURM_NODEID={node} contradicts SLURM_STEP_TASKS_PER_NODE: {len(counts)} hosts")
    return World(whole(environ, "SLURM_PROCID"), size, whole(environ, "SLURM_LOCALID"), counts[node])


def _counts(environ: Mapping[str, str], size: int) -> tuple[int, ...]:
    """The tasks on each host. SLURM_NTASKS_PER_NODE is only what was asked for, so it comes second."""
    per_host = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if per_host:
        return expand_counts(per_host)
    each = whole(environ, "SLURM_NTASKS_PER_NODE", at_least=1)
    return (each,) * -(-size // each)


def _address(environ: Mapping[str, str], world: World) -> str:
    if world.on_one_host:
        return LOOPBACK
    return environ.get("MASTER_ADDR") or expand_hosts(text(environ, "SLURM_STEP_NODELIST"))[0]


def _port(environ: Mapping[str, str]) -> int:
    if environ.get("MASTER_PORT"):
        return port(environ)
    return derived_port(f"slurm/{text(environ, 'SLURM_JOB_ID')}/{environ.get('SLURM_STEP_ID', '0')}")
