"""A worker's stack, queried by the launcher.

On SIGUSR2, faulthandler in the worker writes the calls of its main thread into a file, even inside a native call that
never returns. The launcher sends the signal and reads what is new in the file.
"""

import faulthandler
import linecache
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.channels.traceback_lines import Frame, is_users
from lockstep.launch.host.folder import open_new

STACK_SIGNAL = signal.SIGUSR2
_CALL = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def stack_path(folder: Path, slot: int) -> Path:
    return folder / f"worker-{slot}.stack"


def answer_stack_queries(folder: Path, slot: int) -> None:
    """From now on this process answers stack queries; if the file cannot be opened, it ignores them."""
    try:
        fd = open_new(stack_path(folder, slot))
    except OSError:
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    else:
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False, chain=False)


@dataclass(frozen=True)
class StackFile:
    """See `StackQuery`. `skip_bytes` of the file are answers to earlier queries."""

    path: Path
    skip_bytes: int

    @classmethod
    def of(cls, folder: Path, slot: int) -> "StackFile":
        path = stack_path(folder, slot)
        return cls(path, path.stat().st_size if path.exists() else 0)

    def answer(self) -> Frame | None:
        try:
            written = self.path.read_bytes()[self.skip_bytes :].decode(errors="replace")
        except OSError:
            return None
        return innermost(written) if written.endswith("\n") else None


def innermost(written: str) -> Frame | None:
    """The first call of user code in faulthandler's text, with its line of source."""
    calls = [Frame(file, int(line), function, "") for file, line, function in _CALL.findall(written)]
    call = next((call for call in calls if is_users(call.file)), None)
    if call is None:
        return None
    linecache.checkcache(call.file)
    return call._replace(source=linecache.getline(call.file, call.line).strip())
