"""How far the update of each worker's elements has come, kept where its neighbours can read it when it dies.

# Note [The journal]
# A worker that dies in the middle of an update leaves some elements new, some old, and a few in between. So each batch
# is copied into its worker's journal first, then marked as begun, then updated, then marked as done. A neighbour that
# finds it begun puts the journal's values back and updates it again; one that finds it untouched updates it; the bits
# are those of an update that nobody died in. The journal is as large as the largest batch, so that it stays in a cache.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch

from lockstep.wire import Wire
from lockstep.wire.exchange import exchange_bytes

ALIGN_BYTES = 64
_MARK_BYTES = 8


class Progress(IntEnum):
    """Where the update of a batch stands."""

    UNTOUCHED = -1
    BEGUN = 0
    DONE = 1


class Ledger:
    """The marks of one worker's batches, and its journal, in memory that its neighbours see.

    `number` counts the updates; a mark holds the number of its update, so none has to be cleared. The
    worker that updates a batch, its own or a neighbour, uses the ledger of the worker that the batch belongs to.
    """

    def __init__(self, memory: torch.Tensor, num_batches: int) -> None:
        self.memory = memory
        self._marks = (ctypes.c_int64 * num_batches).from_address(memory.data_ptr())
        self._journal = memory[_begin_of_journal(num_batches) :]
        self._copies: dict[int, list[torch.Tensor]] = {}

    def progress(self, batch: int, number: int) -> Progress:
        return Progress(max(-1, self._marks[batch] - 2 * number))

    def mark(self, batch: int, number: int, progress: Progress) -> None:
        self._marks[batch] = 2 * number + progress

    def write(self, batch: int, tensors: list[torch.Tensor]) -> None:
        """The tensors of a batch, as they are now, stand in the journal."""
        if tensors:
            torch._foreach_copy_(self._places(batch, tensors), tensors)

    def read(self, batch: int, tensors: list[torch.Tensor]) -> None:
        """They are as they were when `write` was called with the same ones."""
        if tensors:
            torch._foreach_copy_(tensors, self._places(batch, tensors))

    def _places(self, batch: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where the tensors of a batch stand in the journal."""
        if batch not in self._copies:
            begin, places = 0, []
            for tensor in tensors:
                place = self._journal[begin : begin + tensor.nbytes].view(tensor.dtype)
                places.append(place.as_strided(tensor.shape, tensor.stride(), place.storage_offset()))
                begin += _up(tensor.nbytes)
            self._copies[batch] = places
        return self._copies[batch]


def num_bytes(num_batches: int, journals: Sequence[Sequence[int]]) -> int:
    """How large the memory of a ledger is; `journals` has the sizes of the tensors of each batch."""
    return _begin_of_journal(num_batches) + max((sum(map(_up, sizes)) for sizes in journals), default=0)


def open_ledgers(wire: Wire, sizes_bytes: Sequence[int], nums_batches: Sequence[int]) -> list[Ledger]:
    """Collective. A ledger for each worker of this host, in order of their ranks, visible to all of them."""
    members = wire.host_members
    own = members.index(wire.world.rank)
    if wire.host is None:
        return [Ledger(torch.zeros(sizes_bytes[own], dtype=torch.uint8), nums_batches[own])]
    memory = wire.host.allocate(max(1, sizes_bytes[own]))
    (segment,) = wire.host.reveal([memory])
    segments = exchange_bytes(wire.transport, str(segment).encode())
    return [
        Ledger(wire.host.view(member, int(segments[member]))[: sizes_bytes[place]], nums_batches[place])
        for place, member in enumerate(members)
    ]


def release_ledger(wire: Wire, ledger: Ledger) -> None:
    """This worker's own ledger is not needed any more. It goes when no neighbour looks at it either."""
    if wire.host is not None:
        wire.host.release(ledger.memory)


def _begin_of_journal(num_batches: int) -> int:
    return _up(_MARK_BYTES * max(1, num_batches))


def _up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
