"""Memory that the workers of a host hold once, and read through views that each may write to.

# Note [A view that may be written]
# Every worker maps the memory twice. Through `shared` it writes for all workers. `view` is a private mapping: each of
# its pages shows what `shared` holds, until this worker writes to that page; then the kernel gives this worker a copy
# of the page. So what a script writes to a parameter changes the value of its own worker, once, as though that worker
# had a copy of all. `written` finds such pages in the kernel's page table, `forget` gives them up.
"""

import ctypes
import fcntl
import mmap
import os
import struct
from contextlib import suppress
from itertools import pairwise

import torch

from lockstep.errors import BadEnvironment
from lockstep.wire.shared.segments import mapped

PAGE_BYTES = mmap.PAGESIZE
PAGE_TABLE = "/proc/self/pagemap"

_ENTRY_BYTES = 8
_SWAPPED, _OF_A_FILE = 62, 61
"""Bits of an entry of the page table; the sign bit says that the page is present."""

_DONT_NEED = 4
"""MADV_DONTNEED: a private mapping shows the file again."""

_SCAN = 0xC0606610
"""PAGEMAP_SCAN, of Linux 6.7 on: the kernel itself looks for pages of a kind, and passes over what was never read."""
_SCAN_BYTES, _FILE, _PRESENT_OR_SWAPPED = 96, 1 << 2, 1 << 3 | 1 << 4
_REGION = struct.Struct("<3Q")
_MOST_REGIONS = 512


class OnceMemory:
    """Bytes in shared memory, mapped as `shared` and as `view`. See Note [A view that may be written]."""

    def __init__(self, file: int, num_bytes: int) -> None:
        """Maps the open file, which the caller may close afterwards."""
        self.shared = mapped(file, num_bytes)
        self.view = mapped(file, num_bytes, private=True)

    def written(self) -> list[slice]:
        """The bytes, in whole pages, of which this worker has pages of its own."""
        try:
            return _scanned(self.view)
        except OSError:  # an older kernel
            return _read_entries(self.view)

    def differs(self, span: slice) -> bool:
        """Whether these bytes are others in `view` than in `shared`."""
        return not torch.equal(self.view[span], self.shared[span])

    def forget(self, span: slice) -> None:
        """In these bytes, which are whole pages, the view shows what `shared` holds."""
        libc, begin = ctypes.CDLL(None, use_errno=True), self.view.data_ptr() + span.start
        result = libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(span.stop - span.start), ctypes.c_int(_DONT_NEED))
        if result != 0:
            reason = os.strerror(ctypes.get_errno())
            raise BadEnvironment(f"pages of shared memory cannot be given up ({reason})")


def return_freed_memory() -> None:
    """What this process has freed goes back to the system: glibc may keep it for itself otherwise."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def check_page_table() -> None:
    """Raises if this process cannot read its own page table."""
    _page_entries(torch.zeros(1, dtype=torch.uint8))


def _scanned(memory: torch.Tensor) -> list[slice]:
    """The bytes of pages that are present, or swapped out, and not those of the file."""
    begin, end = memory.data_ptr(), memory.data_ptr() + -(-memory.nbytes // PAGE_BYTES) * PAGE_BYTES
    regions, found = bytearray(_MOST_REGIONS * _REGION.size), list[slice]()
    place = ctypes.addressof(ctypes.c_char.from_buffer(regions))
    start, file = begin, os.open(PAGE_TABLE, os.O_RDONLY | os.O_CLOEXEC)  # each time: a forked process has its own
    try:
        while start < end:
            asked = (_SCAN_BYTES, 0, start, end, 0, place, _MOST_REGIONS, 0, _FILE, _FILE, _PRESENT_OR_SWAPPED, _FILE)
            answer = bytearray(struct.pack("<12Q", *asked))
            for number in range(fcntl.ioctl(file, _SCAN, answer)):
                first, last, _ = _REGION.unpack_from(regions, number * _REGION.size)
                found.append(slice(first - begin, last - begin))
            start = struct.unpack_from("<Q", answer, 32)[0]
    finally:
        os.close(file)
    return _joined(found)


def _joined(parts: list[slice]) -> list[slice]:
    """Neighbours together."""
    whole: list[slice] = []
    for part in parts:
        if whole and whole[-1].stop == part.start:
            whole[-1] = slice(whole[-1].start, part.stop)
        else:
            whole.append(part)
    return whole


def _read_entries(memory: torch.Tensor) -> list[slice]:
    """The same, page by page, where the kernel cannot be asked."""
    entries = _page_entries(memory)
    return _runs(((entries < 0) | _bit(entries, _SWAPPED)) & ~_bit(entries, _OF_A_FILE))


def _page_entries(memory: torch.Tensor) -> torch.Tensor:
    """One entry of the kernel's page table for each page of the memory, which begins at a page."""
    num_pages = -(-memory.nbytes // PAGE_BYTES)
    entries = bytearray(num_pages * _ENTRY_BYTES)
    start = memory.data_ptr() // PAGE_BYTES * _ENTRY_BYTES
    try:
        file = os.open(PAGE_TABLE, os.O_RDONLY | os.O_CLOEXEC)  # opened each time: a forked process has its own
        try:
            _read_fully(file, memoryview(entries), start)
        finally:
            os.close(file)
    except OSError as error:
        raise BadEnvironment(
            f"{PAGE_TABLE} cannot be read ({error.strerror}), so a change that a script makes to a parameter would not "
            'be noticed: start with strategy="replicated"'
        ) from error
    return torch.frombuffer(entries, dtype=torch.int64)


def _read_fully(file: int, place: memoryview, offset: int) -> None:
    done = 0
    while done < len(place):
        count = os.preadv(file, [place[done:]], offset + done)
        if count == 0:
            raise OSError(0, "it ends too early")
        done += count


def _bit(entries: torch.Tensor, number: int) -> torch.Tensor:
    return (entries >> number & 1).bool()


def _runs(pages: torch.Tensor) -> list[slice]:
    """The bytes of the pages that are marked, neighbours together."""
    numbers = pages.nonzero().flatten().tolist()
    if not numbers:
        return []
    breaks = [0, *(at + 1 for at, (one, two) in enumerate(pairwise(numbers)) if two != one + 1), len(numbers)]
    return [slice(numbers[begin] * PAGE_BYTES, (numbers[end - 1] + 1) * PAGE_BYTES) for begin, end in pairwise(breaks)]
