"""What a run is, as far as its bits depend on it: script, arguments, versions, hardware."""

import hashlib
import os
import platform
import sys
from collections.abc import Iterator

import torch

from lockstep.determinism.hardware import recorded
from lockstep.launch.channels.traceback_lines import is_users
from lockstep.settings.options import Settings
from lockstep.state.checkpoints.trail import Circumstances
from lockstep.version import VERSION

MOST_FILES = 300


def circumstances(settings: Settings) -> Circumstances:
    """By name. Of a script that has loaded more files since, two of these have what both have in common."""
    return {
        "arguments": "\0".join(sys.argv[1:]),
        "version of lockstep": VERSION,
        "version of torch": torch.__version__,
        "version of Python": platform.python_version(),
        "threads": str(settings.threads),
        **recorded(settings.device),
        **dict(_files()),
    }


def _files() -> Iterator[tuple[str, str]]:
    """The script's own files that are loaded, and the digest of each."""
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = dict.fromkeys(path for path in (sys.argv[0], *loaded) if isinstance(path, str) and is_users(path))
    for path in list(paths)[:MOST_FILES]:
        try:
            with open(path, "rb") as file:
                yield os.path.basename(path), hashlib.file_digest(file, "blake2b").hexdigest()[:16]
        except OSError:  # an interactive session
            continue
