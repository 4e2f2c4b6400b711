"""Whether the kernel killed something here because memory ran out."""

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def count_memory_kills() -> int:
    """How often the kernel killed a process of this control group for memory; 0 where it does not say."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        ours = next(line.removeprefix("0::/") for line in groups if line.startswith("0::/"))
        return _oom_kills((_CGROUPS / ours / "memory.events").read_text())
    except (OSError, StopIteration, ValueError):
        return 0


def _oom_kills(events: str) -> int:
    counts = dict(line.split() for line in events.splitlines())
    return int(counts.get("oom_kill", 0))
