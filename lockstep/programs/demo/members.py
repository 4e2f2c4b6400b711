"""Who takes part in the launch that this process runs, read from its status page."""

import os
from contextlib import closing, suppress

from lockstep.launch.process_stats import process_state
from lockstep.launch.status import StatusReader
from lockstep.programs.demo.kills import Member

_PAGE = "/memfd:lockstep-status"


def living_members() -> list[Member]:
    """The members of the newest generation that live, by slot; nobody while this process launches nothing.

    Called in the launcher's own thread: so no process that has ended since can have lost its number to another.
    """
    fd = _find_page()
    if fd is None:
        return []
    with closing(StatusReader(fd)) as page:
        return _living(page)


def _find_page() -> int | None:
    """The page's descriptor. The launch owns it; it is only looked for among those of this process."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own descriptor is closed by now
            if os.readlink(f"/proc/self/fd/{fd}").startswith(_PAGE):
                return fd
    return None


def _living(page: StatusReader) -> list[Member]:
    rows = page.rows()
    newest = max((row.generation for row in rows.values()), default=0)
    return [
        Member(slot, row.pid, row.step)
        for slot, row in rows.items()
        if row.generation == newest > 0 and not row.is_ending and _lives(row.pid)
    ]


def _lives(pid: int) -> bool:
    found = process_state(pid)
    return found is not None and found.state not in "ZX"
