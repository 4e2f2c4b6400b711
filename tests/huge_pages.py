"""Memory in huge pages: to fork a process costs time for every page that it holds, and tests fork thousands.

`gather_pages` costs a second the first time and hundredths later. Where the kernel has no huge pages or does not gather
them when asked (before Linux 6.1), nothing changes.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def gather_pages() -> None:
    """What is free goes back to the system, what is held is moved into huge pages."""
    _libc.malloc_trim(0)
    for begin, end in list(_own_memory()):
        for address in range(-begin // HUGE_PAGE_BYTES * -HUGE_PAGE_BYTES, end - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
            _libc.madvise(address, HUGE_PAGE_BYTES, MADV_COLLAPSE)  # refused where a huge page would be empty


def _own_memory() -> Iterator[tuple[int, int]]:
    """Where memory of this process begins and ends that is no file's and no thread's stack."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights == "rw-p" and name in ([], ["[heap]"]):
            begin, end = addresses.split("-")
            yield int(begin, 16), int(end, 16)
