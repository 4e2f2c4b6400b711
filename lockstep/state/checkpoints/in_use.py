"""A folder of checkpoints takes those of one training at a time: a second one is refused as long as the first lives.

# Note [Locks of a training]
# Two trainings in one folder would go on from each other's checkpoints and remove them. So every worker of a training
# has a shared lock (fcntl) on the file `.in-use`, and its first worker looks, before it takes its own, whether another
# process has one. The kernel ends such a lock with its process, and a process that is forked does not have it: neither
# a killed training nor its loader processes that live a moment longer keep anybody out. A copy of a worker takes a lock
# of its own. Closing any descriptor of the file ends the locks of a process, so what is in it is written before. A lock
# of another host may outlive that host, so it is only noted. On a file system without locks nobody is kept out.
"""

import fcntl
import json
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FILE = ".in-use"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FLOCK = "hhqqi"
"""Linux's struct flock: type, whence, start, length, process."""


class FolderUse:
    """This worker's lock on a folder. Its owner calls `close`. See Note [Locks of a training].

    `say` is called if a training on another host may use the folder.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = folder / FILE, say
        self._descriptor: int | None = None

    def claim(self) -> str:
        """Called by the first worker of a training that begins: why it may not use the folder; empty if it may."""
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _alone_in(self._path.parent):
                user = _user(self._path)
                if user is not None and user.get("host") == _host():
                    return (
                        f"{self._path.parent} takes the checkpoints of another training, which goes on (process "
                        f"{user['process'] or 'in another container'} of this host). Give this one a folder of its "
                        "own, or end the other; run.resume(path) reads one of its checkpoints"
                    )
                if user is not None:
                    self._say(
                        f"another training, on host {user.get('name')!r}, may use {self._path.parent}: if it goes on, "
                        "give this one a folder of its own"
                    )
                _write(self._path)
                self.join()
        return ""

    def join(self) -> None:
        """This worker belongs to the training that uses the folder; so does a copy of it, once it is called there."""
        with suppress(OSError):
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Inside, no other process looks whether it may use the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _user(path: Path) -> dict[str, Any] | None:
    """Who has a lock on the file, as far as it is known; None if no other process has one."""
    if sys.platform != "linux":
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor) as file:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, process = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            return None
        try:
            return {**json.load(file), "process": process}
        except (ValueError, TypeError):
            return {}


def _write(path: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "w") as file:
        json.dump({"host": _host(), "name": platform.node()}, file)


def _host() -> str:
    """This host since it was started."""
    with suppress(OSError):
        return f"{platform.node()} {_BOOT_ID.read_text().strip()}"
    return platform.node()
