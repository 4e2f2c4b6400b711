"""The memory that a side needs beside Python and torch: the highest PSS of this process while it trains.

Shared pages count once for all workers. The workers' peaks are added up for the host, so that is an upper bound.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from lockstep.wire.shared.once import return_freed_memory

_ROLLUP = Path("/proc/self/smaps_rollup")


def pss_bytes() -> int:
    """What this process holds now; of a page that several hold, its share."""
    lines = _ROLLUP.read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def settled_pss_bytes() -> int:
    """The same when freed memory was returned."""
    return_freed_memory()
    return pss_bytes()


def peak_pss_bytes(work: Callable[[], None]) -> int:
    """The highest of many looks while `work` runs."""
    done, highest = threading.Event(), [pss_bytes()]

    def look() -> None:
        while not done.wait(0.002):
            highest[0] = max(highest[0], pss_bytes())

    watcher = threading.Thread(target=look, name="lockstep-bench-memory")
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(highest[0], pss_bytes())
