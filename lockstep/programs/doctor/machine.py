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
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata, util
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import psutil

from lockstep.launch.host.resources import ControlGroups
from lockstep.programs.doctor.checkpoint_trial import try_saving
from lockstep.programs.doctor.checks import EXTRAS, NEEDED, OURS
from lockstep.programs.doctor.diagnosis import MiB
from lockstep.programs.doctor.facts import Facts
from lockstep.programs.doctor.leftovers import leftovers
from lockstep.version import VERSION

DISTRIBUTIONS = (OURS, *NEEDED, "llvmlite", *(package for package, _ in EXTRAS.values()))
"""Asked for by their metadata: importing torch takes seconds."""

RESOLVING_S = 1.0
ASKING_S = 5.0
_QUERY = ("--query-gpu=name,memory.free", "--format=csv,noheader,nounits")
_MPS_DAEMON = "nvidia-cuda-mps-control"[:15]  # the kernel keeps so many letters of a process's name


T = TypeVar("T")
D = TypeVar("D")


def gather(num_workers: int | None, runs: Path, environ: Mapping[str, str]) -> Facts:
    """Everything about this machine that the checks need. Without a number, there are as many workers as cores."""
    groups = ControlGroups.of_this_process()
    limit, left = groups.memory() or (None, None)
    in_group = groups.processes_left()
    shared = tried(lambda: shutil.disk_usage("/dev/shm"), None)
    soft, hard = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    facts = Facts(
        num_workers or 1,
        python=tuple(sys.version_info[:3]),
        running=VERSION,
        installed={name: tried(partial(metadata.version, name), None) for name in DISTRIBUTIONS},
        saving_error=try_saving(),
        usable_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        core_quota=groups.cpu_quota(),
        threads=environ.get("OMP_NUM_THREADS") or None,
        architecture=platform.machine(),
        free_bytes=int(psutil.virtual_memory().available),
        group_limit_bytes=limit,
        group_left_bytes=left,
        memfd=tried(_use_memfd, False),
        open_files_soft=soft,
        open_files_hard=hard,
        processes_left=min(_processes_of_user_left(), inf if in_group is None else in_group),
        interfaces=tried(lambda: tuple(psutil.net_if_addrs()), None),
        gloo_interfaces=gloo_interfaces(environ),
        loopback_works=tried(_use_loopback, False),
        shm_bytes=shared and shared.total,
        shm_free_bytes=shared and shared.free,
        **disk(runs),
        **resolve_own_name(RESOLVING_S),
        **gpus(),
        **leftovers(runs),
    )
    return facts if num_workers is not None else replace(facts, num_workers=max(int(facts.cores_worth or 1), 1))


# Fields of the facts that are found out together.


def disk(folder: Path) -> dict[str, Any]:
    there = next((above for above in (folder, *folder.absolute().parents) if above.is_dir()), Path("/"))
    free = tried(lambda: shutil.disk_usage(there).free, None)
    return {"folder": str(there), "disk_free_bytes": free, "writable": os.access(there, os.W_OK | os.X_OK)}


def resolve_own_name(waited_s: float) -> dict[str, Any]:
    """Waits at most `waited_s` for an answer."""
    name = socket.gethostname()
    answers: SimpleQueue[tuple[str, ...]] = SimpleQueue()
    began_s = time.monotonic()
    # getaddrinfo knows no time limit; a daemon does not keep the program from ending
    Thread(target=lambda: answers.put(tried(partial(_addresses, name), ())), daemon=True).start()
    try:
        addresses, took_s = answers.get(timeout=waited_s), time.monotonic() - began_s
    except Empty:
        addresses, took_s = (), None
    return {"host_name": name, "addresses": addresses, "resolving_s": took_s, "waited_s": waited_s}


def gpus() -> dict[str, Any]:
    """By nvidia-smi, or the kernel's names without it. MPS is the daemon by which several processes share a GPU."""
    tool = partial(subprocess.run, capture_output=True, text=True, timeout=ASKING_S, check=True)
    listed = tried(lambda: parse_gpus(tool(["nvidia-smi", *_QUERY]).stdout), None)
    names = tuple(name for name, _ in listed) if listed is not None else _names_by_kernel()
    free_bytes = tuple(free for _, free in listed) if listed is not None else None
    mps = any(process.info["name"] == _MPS_DAEMON for process in (psutil.process_iter(["name"]) if names else ()))
    return {"gpus": names, "gpu_free_bytes": free_bytes, "torch_cuda": tried(_cuda_of_torch, None), "mps": mps}


def gloo_interfaces(environ: Mapping[str, str]) -> tuple[str, ...]:
    named = environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return tuple(name.strip() for name in named if name.strip())


def parse_gpus(lines: str) -> list[tuple[str, int]]:
    """Each GPU's name and free bytes, from lines like `NVIDIA H200, 142771`; other lines are left out."""
    matches = (re.fullmatch(r"(.+), (\d+)", line.strip()) for line in lines.splitlines())
    return [(match[1], int(match[2]) * MiB) for match in matches if match]


def tried(ask: Callable[[], T], otherwise: D) -> T | D:
    """The answer, or something else where there is none: no such file, program or package."""
    try:
        return ask()
    except (OSError, AttributeError, UnicodeError, ImportError, subprocess.SubprocessError):
        return otherwise


def _limit(number: int) -> float:
    return inf if number == resource.RLIM_INFINITY else number


def _processes_of_user_left() -> float:
    """The limit counts all threads of the user; root has none."""
    most = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if os.getuid() == 0 or most == inf:
        return inf
    ours = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
    return most - sum(one["num_threads"] or 1 for one in ours if one["uids"] and one["uids"].real == os.getuid())


def _use_memfd() -> bool:
    os.close(os.memfd_create("lockstep-doctor"))
    return True


def _use_loopback() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=0.5).close()
    return True


def _addresses(name: str) -> tuple[str, ...]:
    resolved = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in resolved))


def _names_by_kernel() -> tuple[str, ...]:
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    matches = (re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE) for path in files)
    return tuple(match[1].strip() if match else "GPU" for match in matches)


def _cuda_of_torch() -> str | None:
    """The version of CUDA in torch's version file; None for a torch without it, and where there is no torch."""
    torch = util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    text = (Path(torch.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda\b[^=]*= *['\"](.+)['\"]", text, re.MULTILINE)
    return match[1] if match else None
