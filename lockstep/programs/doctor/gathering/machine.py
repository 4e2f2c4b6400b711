"""What the kernel and Python say about this machine."""

import os
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from importlib import metadata
from math import inf
from pathlib import Path

import psutil

from lockstep.programs.doctor.checks.software import NEEDED, OURS
from lockstep.programs.doctor.facts import Disk, Limits, Memory, Network, SharedMemory, Software
from lockstep.programs.doctor.gathering.control_groups import ControlGroups
from lockstep.version import VERSION


def software() -> Software:
    """By the installed metadata: importing torch takes seconds."""
    names = (OURS, *NEEDED, "llvmlite")
    return Software(tuple(sys.version_info[:3]), VERSION, {name: _installed(name) for name in names})


def usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def memory(groups: ControlGroups) -> Memory:
    limit, left = groups.memory() or (None, None)
    return Memory(int(psutil.virtual_memory().available), limit, left)


def shared_memory() -> SharedMemory:
    memfd = _memfd_works()
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return SharedMemory(memfd=memfd)
    return SharedMemory(usage.total, usage.free, memfd)


def limits(groups: ControlGroups) -> Limits:
    soft, hard = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    return Limits(soft, hard, min(_processes_of_user_left(), _or_no_limit(groups.processes_left())))


def network(environ: Mapping[str, str]) -> Network:
    named = environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return Network(_interfaces(), _loopback_works(), tuple(name.strip() for name in named if name.strip()))


def disk(folder: Path) -> Disk:
    there = next((above for above in (folder, *folder.absolute().parents) if above.is_dir()), Path("/"))
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        free = None
    return Disk(str(there), free, os.access(there, os.W_OK | os.X_OK))


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _memfd_works() -> bool:
    try:
        os.close(os.memfd_create("lockstep-doctor"))
    except (OSError, AttributeError):
        return False
    return True


def _limit(number: int) -> float:
    return inf if number == resource.RLIM_INFINITY else number


def _or_no_limit(number: float | None) -> float:
    return inf if number is None else number


def _processes_of_user_left() -> float:
    """The limit counts all threads of the user; root has none."""
    most = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if os.getuid() == 0 or most == inf:
        return inf
    ours = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
    return most - sum(one["num_threads"] or 1 for one in ours if one["uids"] and one["uids"].real == os.getuid())


def _interfaces() -> tuple[str, ...] | None:
    try:
        return tuple(psutil.net_if_addrs())
    except OSError:
        return None


def _loopback_works() -> bool:
    """Whether a connection to oneself can be made."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=0.5).close()
    except OSError:
        return False
    return True
