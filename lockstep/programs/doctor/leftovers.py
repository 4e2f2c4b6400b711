"""What runs that have ended left behind on this machine."""

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lockstep.launch.host.processes import process_state
from lockstep.launch.scale import find_launcher
from lockstep.programs.doctor.facts import Orphan
from lockstep.settings.environments.lockstep_run import MARK, PARENT_PID
from lockstep.state.checkpoints.lock import MANIFEST
from lockstep.state.checkpoints.lock import leftovers as partial_folders

SHARED = Path("/dev/shm")
_OF_TORCH = re.compile(r"torch_(\d+)_\d+_\d+")


def leftovers(runs: Path) -> dict[str, Any]:
    """Fields of the facts."""
    files = torch_files(SHARED)
    return {
        "orphans": find_orphans(),
        "dead_runs": dead_runs(runs),
        "partial_checkpoints": partial_checkpoints(runs),
        "shared_files": None if files is None else tuple(map(str, files)),
        "shared_files_bytes": sum(map(_used_bytes, files or ())),
    }


def find_orphans() -> tuple[Orphan, ...] | None:
    """Processes that were started by a launcher which is gone; None where the kernel does not show processes."""
    if process_state(os.getpid()) is None:
        return None
    return tuple(orphan for process in psutil.process_iter() if (orphan := _as_orphan(process)) is not None)


def dead_runs(runs: Path) -> tuple[str, ...] | None:
    """Folders of runs whose `launcher.json` names a launcher that does not run here."""
    if process_state(os.getpid()) is None:
        return None
    folders = sorted(card.parent for card in runs.glob("*/launcher.json"))
    return tuple(str(folder) for folder in folders if find_launcher(folder) is None)


def partial_checkpoints(runs: Path) -> tuple[str, ...]:
    """Folders of half-written checkpoints that no process writes any more."""
    places = (*runs.glob("*"), *runs.glob("*/checkpoints"))
    partials = [partial for place in sorted(places) if place.is_dir() for partial in partial_folders(place)]
    return tuple(str(partial) for partial in partials if not _is_held(partial))


def torch_files(folder: Path) -> tuple[Path, ...] | None:
    """Files under which torch shares tensors, of processes that have ended, as far as this user may remove them."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return None
    matches = (match for match in map(_OF_TORCH.fullmatch, names) if match)
    return tuple(folder / match[0] for match in matches if _is_left(folder / match[0], int(match[1])))


def _is_left(file: Path, pid: int) -> bool:
    with suppress(OSError):
        return not psutil.pid_exists(pid) and os.getuid() in (0, file.stat().st_uid)
    return False


def _as_orphan(process: psutil.Process) -> Orphan | None:
    try:
        environ = process.environ()
        parent = environ.get(PARENT_PID, "")
        if MARK not in environ or not parent.isdecimal() or not _numbers_mean_the_same(process.pid):
            return None
        if _had_started(int(parent), process):
            return None
        return Orphan(process.pid, " ".join(process.cmdline())[:60] or process.name())
    except (psutil.Error, OSError):
        return None


def _had_started(pid: int, before: psutil.Process) -> bool:
    """Whether `pid` lives and is older than `before`: a younger process only has reused the launcher's number."""
    try:
        launcher = psutil.Process(pid)
        return bool(launcher.status() != psutil.STATUS_ZOMBIE and launcher.create_time() <= before.create_time())
    except psutil.NoSuchProcess:
        return False


def _numbers_mean_the_same(pid: int) -> bool:
    """Whether the process is in our namespace: in another container its launcher has another number."""
    return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")


def _is_held(partial: Path) -> bool:
    """Whether a process writes it now. See Note [Locks that end with their process]."""
    try:
        with open(partial / MANIFEST, "rb") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _used_bytes(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_blocks * 512
    return 0
