"""Why this process cannot be copied now, if it cannot.

# Note [What a copy would disturb]
# A fork has one thread, the one that forks, and shares everything that is open with the process it was made from. So a
# process is not copied that has threads or child processes that lockstep does not know, uses a GPU or a pool of
# threads, or holds connections of its own, or files that it reads and writes. Files that are only read are opened
# again by the copy, at the same place; files that are only written are shared, and were flushed before. Loader
# processes of sharded loaders stay with the original, and the copy starts its own.
"""

import fcntl
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

import psutil
import torch

from lockstep.elastic.store.server import THREAD_NAME

STORE_THREADS = "pt_tcpstore"
"""What torch calls the threads of its stores: the copy leaves those stores to the original."""

FEEDER = "QueueFeederThread"
"""Python's thread behind the queue to a loader process."""

ENDING_S = 0.2
"""How long a thread may take to end."""

_IN_MEMORY = ("/memfd:", "/dev/shm/", "/dev/zero")
_FOR_PROFILERS = re.compile(r"/tmp/perf-\d+\.map")
"""In which libraries that make code (oneDNN on Arm) say where it stands."""


def obstacle(ports: Collection[int], loader_pids: Collection[int]) -> str | None:
    """Why this process cannot be copied. `ports` are those of lockstep's own sockets."""
    if torch.cuda.is_initialized():
        return "it uses a GPU"
    if torch.get_num_threads() > 1:
        return f"it computes with {torch.get_num_threads()} threads"
    return _of_threads(bool(loader_pids)) or _of_children(loader_pids) or _of_files(ports)


def _of_threads(has_loaders: bool) -> str | None:
    """Threads that end just now, such as those of a wire that was closed, are waited for."""
    deadline_s = time.monotonic() + ENDING_S
    while (why := _of_threads_now(has_loaders)) is not None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return why


def _of_threads_now(has_loaders: bool) -> str | None:
    known = {threading.get_native_id()}
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not _is_harmless(thread, has_loaders):
            return f"it has a thread of its own, {thread.name!r}"
        known.add(thread.native_id or 0)
    native = [name for task, name in _tasks() if task not in known and not name.startswith(STORE_THREADS)]
    return f"it has native threads ({', '.join(sorted(set(native)))})" if native else None


def _is_harmless(thread: threading.Thread, has_loaders: bool) -> bool:
    """tqdm's looks after bars that stand still; without it they do so unnoticed. The copy has a store of its own."""
    is_known = type(thread).__module__.startswith("tqdm") or thread.name.startswith(THREAD_NAME)
    return is_known or (has_loaders and thread.name == FEEDER)


def _tasks() -> Iterator[tuple[int, str]]:
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            yield int(task), file.read().strip()


def _of_children(loader_pids: Collection[int]) -> str | None:
    children = [child for child in psutil.Process().children() if child.pid not in loader_pids]
    named = [_command(child) for child in children]
    strange = [command for command in named if "resource_tracker" not in command]
    return f"it has a child process ({strange[0]:.60})" if strange else None


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()) or process.name()
    return "resource_tracker"  # gone meanwhile, so none at all


def _of_files(ports: Collection[int]) -> str | None:
    for fd in _open_files():
        with suppress(OSError):
            mode = os.fstat(fd).st_mode
            if stat.S_ISSOCK(mode) and not _is_ours(fd, ports):
                return "it has a network connection of its own"
            both = stat.S_ISREG(mode) and access_mode(fd) == os.O_RDWR
            path = os.readlink(f"/proc/self/fd/{fd}")
            if both and not path.startswith(_IN_MEMORY) and not _FOR_PROFILERS.fullmatch(path):
                return f"it reads and writes {path}"
    return None


def _is_ours(fd: int, ports: Collection[int]) -> bool:
    with socket.socket(fileno=os.dup(fd)) as connection:
        if connection.family == socket.AF_UNIX:
            return connection.getsockname() == "" and connection.type == socket.SOCK_SEQPACKET  # the launcher's
        ends = [connection.getsockname()]
        with suppress(OSError):
            ends.append(connection.getpeername())
        return any(end[1] in ports for end in ends)


def access_mode(fd: int) -> int:
    """Whether the file is open for reading, writing, or both."""
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE


def _open_files() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]
