"""Locks on a checkpoint's folder, which end with the process that holds them.

# Note [Locks that end with their process]
# The manifest of a checkpoint is locked (flock): exclusively by a process that writes or removes the folder, shared by
# those that read it. The kernel ends a lock with its process, however that ends. So a folder that a killed writer left
# is distinguished from one in use without process numbers, which are used again and differ between containers. On a
# file system without such locks every folder counts as not in use.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MANIFEST = "manifest.json"
PARTIAL = ".partial"


@contextmanager
def new_partial(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, locked by this process; what has the folder's name afterwards is removed."""
    partial, descriptor = _locked_partial(path)
    try:
        yield partial
    finally:
        if _is_there(partial, descriptor):
            shutil.rmtree(partial, ignore_errors=True)
        _unlock(descriptor)
        remove_unless_locked(partial)  # an older checkpoint, when the two were exchanged; a process may be reading it


@contextmanager
def read_lock(path: Path) -> Iterator[None]:
    """Inside, no process removes the checkpoint at `path`, if there is one."""
    try:
        descriptor = os.open(path / MANIFEST, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        _lock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        _unlock(descriptor)


def remove_unless_locked(path: Path) -> bool:
    """Removes a checkpoint, or what is left of one, unless a process writes or reads it. Returns whether it is gone.

    It is renamed first, so that a remover that is killed leaves no half checkpoint under a good name.
    """
    try:
        descriptor = os.open(path / MANIFEST, os.O_RDWR)
    except FileNotFoundError:
        return _remove_empty(path)
    except OSError:
        return False
    try:
        if not _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
        return _remove(path)
    finally:
        _unlock(descriptor)


def leftovers(folder: Path) -> list[Path]:
    """Folders of writers and removers that are running, or were killed."""
    return sorted(path for path in folder.glob(f".*{PARTIAL}") if path.is_dir() and not path.is_symlink())


def _locked_partial(path: Path) -> tuple[Path, int]:
    """A process that removes leftovers may take the folder before it is locked: then another one is made."""
    while True:
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent))
        try:
            descriptor = os.open(partial / MANIFEST, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileNotFoundError:
            continue
        except OSError:
            _remove_empty(partial)
            raise
        _lock(descriptor, fcntl.LOCK_EX)
        if _is_there(partial, descriptor):
            return partial, descriptor
        os.close(descriptor)


def _is_there(folder: Path, descriptor: int) -> bool:
    """Whether the folder's manifest is the one that is locked."""
    with suppress(OSError):
        return os.path.samestat(os.stat(folder / MANIFEST), os.fstat(descriptor))
    return False


def _unlock(descriptor: int) -> None:
    """Unlocks also a copy of the descriptor in a process that was forked meanwhile."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _remove(path: Path) -> bool:
    nameless = path
    if not path.name.endswith(PARTIAL):
        nameless = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent))
        path.rename(nameless)  # onto an empty folder
    # The manifest goes last: until then the folder is known to be locked.
    for entry in nameless.iterdir():
        if entry.is_file() and entry.name != MANIFEST:
            entry.unlink()
    shutil.rmtree(nameless, ignore_errors=True)
    return not path.exists()


def _remove_empty(path: Path) -> bool:
    """A folder without a manifest was left before anything was written, or after all else was removed."""
    with suppress(OSError):
        path.rmdir()
    return not path.exists()


def _lock(descriptor: int, kind: int) -> bool:
    """Whether the lock was taken, or the file system has none."""
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
