"""A function and its arguments as a file for the workers, and what the first of them returned as another.

    python -m lockstep.launch.worker --module lockstep.launch.call FOLDER

# Note [Files of a call]
# Functions of a notebook are in no file that a worker could import: they are pickled (cloudpickle), which is done
# nowhere else (docs/decisions/0041-launch-from-a-notebook.md). The caller makes a folder that only its user can enter,
# and removes it when the workers have ended. Both sides open the files in it without following links, and read nothing
# that belongs to another user. A file begins with a line of JSON, which can be read before anything is unpickled: a
# worker needs the caller's search path to unpickle at all.
"""

import importlib
import json
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import BadArgument, BadEnvironment

FUNCTION, VALUE = "function", "value"

_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class CallHeader:
    """What a worker takes over before it unpickles the function: `sources` are texts that are in no file, by name."""

    name: str
    search_path: list[str] = field(default_factory=list)
    sources: Mapping[str, str] = field(default_factory=dict)


def write_call(folder: Path, header: CallHeader, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Writes the function and its arguments for the workers; raises if they cannot be pickled."""
    _write(folder / FUNCTION, header, _pickled((function, args), f"{header.name} cannot be sent to the workers"))


def read_value(folder: Path) -> Any:
    """What the function has returned on the first worker; None if it has returned nowhere."""
    try:
        _, pickled = _read(folder / VALUE)
    except FileNotFoundError:
        return None
    return pickle.loads(pickled)


def main() -> None:
    """Calls the function in this worker. The present first one writes what it returned."""
    folder = Path(sys.argv[1])
    header, pickled = _read(folder / FUNCTION)
    sys.argv = [header.name]
    sys.path[:] = header.search_path
    for name, text in header.sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    function, args = pickle.loads(pickled)
    value = function(*args)
    if _is_first():
        returned = _pickled(value, f"{header.name} has returned what cannot be sent back")
        (folder / VALUE).unlink(missing_ok=True)  # of a worker that was lost after it had written
        _write(folder / VALUE, CallHeader(header.name), returned)


def cloudpickle() -> Any:
    """The package, where it is installed."""
    try:
        return importlib.import_module("cloudpickle")
    except ModuleNotFoundError as error:
        raise BadEnvironment(
            "lockstep.launch sends functions to the workers by cloudpickle, which is not installed: "
            "pip install 'torch-lockstep[notebook]'"
        ) from error


def _is_first() -> bool:
    """Whether this worker is the first of its run, or was when the run ended; without a run it is alone."""
    active = sys.modules.get("lockstep.run.active")
    return active is None or bool(active.is_first())


def _pickled(value: Any, refused: str) -> bytes:
    try:
        pickled: bytes = cloudpickle().dumps(value)
    except (TypeError, AttributeError, ValueError, pickle.PicklingError, RecursionError) as error:
        raise BadArgument(
            f"{refused}: {type(error).__name__}: {error}. Make what cannot be pickled (an open file, a lock, a "
            "process) inside of the function, and return plain values, tensors or a state_dict"
        ) from error
    return pickled


def _write(path: Path, header: CallHeader, pickled: bytes) -> None:
    """See Note [Files of a call]. Whole under its name, or not there."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(part, _WRITE, 0o600), "wb") as file:
            file.write(json.dumps(asdict(header)).encode() + b"\n" + pickled)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _read(path: Path) -> tuple[CallHeader, bytes]:
    """See Note [Files of a call]."""
    with os.fdopen(os.open(path, _READ), "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            raise BadEnvironment(f"{path} belongs to another user: nothing in it is read")
        return CallHeader(**json.loads(file.readline())), file.read()


if __name__ == "__main__":
    main()
