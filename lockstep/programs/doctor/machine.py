"""Gathers the facts of the machine from the kernel, Python and the driver. What cannot be found out is None."""

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata, util
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import psutil

from lockstep.launch.host.resources import ControlGroups
from lockstep.programs.doctor.checkpoint_trial import try_saving
from lockstep.programs.doctor.checks import EXTRAS, NEEDED, OURS
from lockstep.programs.doctor.diagnosis import MiB
from lockstep.programs.doctor.facts import (
    Cores,
    Disk,
    Facts,
    Gpus,
    HostName,
    Limits,
    MemoryFacts,
    Network,
    SharedMemoryFacts,
    Software,
)
from lockstep.programs.doctor.leftovers import leftovers
from lockstep.version import VERSION

RESOLVING_S = 1.0
ASKING_S = 5.0
_QUERY = ("--query-gpu=name,memory.free", "--format=csv,noheader,nounits")
_MPS_DAEMON = "nvidia-cuda-mps-control"


def gather(num_workers: int | None, runs: Path, environ: Mapping[str, str]) -> Facts:
    """Everything about this machine that the checks need. Without a number, there are as many workers as cores."""
    groups = ControlGroups.of_this_process()
    cores = Cores(usable_cores(), groups.cpu_quota())
    return Facts(
        num_workers=num_workers if num_workers is not None else max(int(cores.worth or 1), 1),
        software=software(),
        host_name=resolve_own_name(RESOLVING_S),
        disk=disk(runs),
        cores=cores,
        memory=memory(groups),
        shared_memory=shared_memory(),
        limits=limits(groups),
        network=network(environ),
        threads=environ.get("OMP_NUM_THREADS") or None,
        architecture=platform.machine(),
        leftovers=leftovers(runs),
        saving_error=try_saving(),
        gpus=gpus(),
    )


def software() -> Software:
    """By the installed metadata: importing torch takes seconds."""
    names = (OURS, *NEEDED, "llvmlite", *(package for package, _ in EXTRAS.values()))
    return Software(tuple(sys.version_info[:3]), VERSION, {name: _installed(name) for name in names})


def usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def memory(groups: ControlGroups) -> MemoryFacts:
    limit, left = groups.memory() or (None, None)
    return MemoryFacts(int(psutil.virtual_memory().available), limit, left)


def shared_memory() -> SharedMemoryFacts:
    memfd = _memfd_works()
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return SharedMemoryFacts(memfd=memfd)
    return SharedMemoryFacts(usage.total, usage.free, memfd)


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


def resolve_own_name(waited_s: float) -> HostName:
    """What the host's name resolves to. Waits at most `waited_s` for an answer."""
    name = socket.gethostname()
    answers: SimpleQueue[tuple[str, ...]] = SimpleQueue()
    began_s = time.monotonic()
    # getaddrinfo knows no time limit; a daemon does not keep the program from ending
    Thread(target=lambda: answers.put(_addresses(name)), daemon=True).start()
    try:
        addresses = answers.get(timeout=waited_s)
    except Empty:
        return HostName(name, waited_s=waited_s)
    return HostName(name, addresses, time.monotonic() - began_s, waited_s)


def gpus() -> Gpus:
    """By nvidia-smi, or the kernel's names without it. MPS is the daemon by which several processes share a GPU."""
    listed = _ask_tool()
    names = tuple(name for name, _ in listed) if listed is not None else _names_by_kernel()
    free_bytes = tuple(free for _, free in listed) if listed is not None else None
    return Gpus(names, free_bytes, _cuda_of_torch(), bool(names) and _mps_runs())


def parse_gpus(lines: str) -> list[tuple[str, int]]:
    """Each GPU's name and free bytes, from lines like `NVIDIA H200, 142771`; other lines are left out."""
    matches = (re.fullmatch(r"(.+), (\d+)", line.strip()) for line in lines.splitlines())
    return [(match[1], int(match[2]) * MiB) for match in matches if match]


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
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=0.5).close()
    except OSError:
        return False
    return True


def _addresses(name: str) -> tuple[str, ...]:
    try:
        resolved = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in resolved))


def _ask_tool() -> list[tuple[str, int]] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        answer = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=ASKING_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_gpus(answer.stdout)


def _names_by_kernel() -> tuple[str, ...]:
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    matches = (re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE) for path in files)
    return tuple(match[1].strip() if match else "GPU" for match in matches)


def _cuda_of_torch() -> str | None:
    """The version of CUDA in torch's version file; None for a torch without it, and where there is no torch."""
    torch = util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    try:
        text = (Path(torch.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*= *['\"](.+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _mps_runs() -> bool:
    """The kernel keeps 15 letters of a process's name."""
    return any(process.info["name"] == _MPS_DAEMON[:15] for process in psutil.process_iter(["name"]))
