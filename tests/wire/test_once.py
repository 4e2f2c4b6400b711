"""Memory that the workers of a host hold once: what a worker's script has written is found, and seen by nobody else."""

import itertools
import os
import random
from collections.abc import Callable

import pytest
import torch

from lockstep.wire.shared import once
from lockstep.wire.shared.once import PAGE_BYTES, OnceMemory
from lockstep.wire.shared.segments import allocate


def _memory(num_bytes: int) -> OnceMemory:
    file = allocate(num_bytes)
    try:
        return OnceMemory(file, num_bytes)
    finally:
        os.close(file)


def test_a_write_to_the_view_is_found_and_seen_by_nobody_else() -> None:
    memory = _memory(5 * 4096)
    memory.shared.fill_(7)
    assert memory.written() == []
    memory.view[2 * 4096 + 5] = 9
    assert memory.written() == [slice(2 * 4096, 3 * 4096)]
    assert int(memory.shared[2 * 4096 + 5]) == 7
    memory.forget(slice(2 * 4096, 3 * 4096))
    assert memory.written() == []
    assert int(memory.view[2 * 4096 + 5]) == 7


def test_a_page_that_is_written_with_what_stands_there_is_a_page_of_its_own_too() -> None:
    memory = _memory(3 * 4096)
    memory.view.fill_(0)
    assert memory.written() == [slice(0, 3 * 4096)]
    assert not memory.differs(slice(0, 3 * 4096))
    memory.shared[0] = 1
    assert int(memory.view[0]) == 0  # its own page still
    memory.forget(slice(0, 4096))
    assert int(memory.view[0]) == 1


@pytest.mark.parametrize("find", [once._scanned, once._read_entries], ids=["asked", "read"])
def test_the_kernel_finds_the_pages_whether_it_is_asked_or_its_table_read(
    find: Callable[[torch.Tensor], list[slice]],
) -> None:
    """Older kernels cannot be asked. More places than one answer has room for."""
    num_pages = 4 * once._MOST_REGIONS
    memory = _memory(num_pages * PAGE_BYTES)
    memory.view.sum()  # pages that are read only are not this worker's own
    assert find(memory.view) == []
    written = sorted(random.Random(1).sample(range(num_pages), 2 * once._MOST_REGIONS))
    for page in written:
        memory.view[page * PAGE_BYTES] = 1
    found = find(memory.view)
    assert [n for span in found for n in range(span.start // PAGE_BYTES, span.stop // PAGE_BYTES)] == written
    assert all(one.stop < two.start for one, two in itertools.pairwise(found))
