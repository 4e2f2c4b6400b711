"""Reduction in shared memory, in place: every worker adds its slice of all workers' roots and writes it to all.

# Note [Direct slices in shared memory]
# Buckets lie in shared memory from the start, so nothing is sent. The workers meet on the board, where each shows its
# roots and the place for the sum. Each adds its own slice over all roots in tree order and writes it to every worker's
# place; then they part. Of a slice's elements only its worker reads or writes anything in between: so the sum may
# go where a root was. Memory is read once and written once per worker: 2·W·P bytes, the least there is.

# Note [Parting late]
# Whoever has parted knows that everyone's slice stands in everyone's memory. So the parting from the last bucket of a
# step is left to the one who waits for the step, when all that it needs besides the sum is there too: this parting is
# the step's commit, and the step needs no further round for it.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from lockstep.errors import Disagreement
from lockstep.lanes import Reduction, Root
from lockstep.wire.reducer import Reducer
from lockstep.wire.schedules import slices
from lockstep.wire.shared.board import MAX_TENSORS, Board, Meeting
from lockstep.wire.shared.kernels import Work, summation
from lockstep.wire.shared.staging import Staging

HURRY_BYTES = 256 * 1024
"""Up to this size a worker stays awake for a moment while it waits: waking up would take longer than the sum."""


class SharedMemory(Reducer):
    """A Reducer for the workers of one host. Tensors that it did not allocate are copied in and out.

    What is not on the CPU, or is spread over thousands of roots, goes `otherwise`.
    """

    def __init__(self, board: Board, otherwise: Reducer, rank: int) -> None:
        self.board = board
        self._staging = Staging(board.memory)
        self._otherwise = otherwise
        self._rank = rank
        self._together = False

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._staging.allocate(num_elements, dtype, device)

    def release(self, tensor: torch.Tensor) -> None:
        self._staging.release(tensor)

    def reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """See Note [Direct slices in shared memory]. Two posts to each peer."""
        self.part()
        if not _suits(reduction, total):
            self._otherwise.reduce(reduction, roots, total)
        elif total.numel() > 0:
            self._reduce(reduction, roots, total)

    def reduce_and_stay(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """See Note [Parting late]. One post to each peer."""
        self.part()
        if not _suits(reduction, total):
            self._otherwise.reduce(reduction, roots, total)
        elif total.numel() > 0:
            self._add(reduction, roots, total, hurry=total.nbytes <= HURRY_BYTES)
            self._together = True

    def part(self) -> bool:
        if not self._together:
            return False
        self._together = False
        self.board.part(hurry=True)
        return True

    def awaited(self) -> list[int]:
        return self.board.awaited()

    def close(self) -> None:
        self.board.memory.neighbours.close()
        self.board.memory.close()

    def _reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        hurry = total.nbytes <= HURRY_BYTES
        place = self._add(reduction, roots, total, hurry)
        self.board.part(hurry=hurry)
        if place.data_ptr() != total.data_ptr():
            total.copy_(place)

    def _add(
        self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor, hurry: bool
    ) -> torch.Tensor:
        """Adds this worker's slice. Gives the place in shared memory where the sum stands when all have parted."""
        shared = [self._staging.shared(root, slot, filled=True) for slot, root in enumerate(roots)]
        place = shared[0] if roots and roots[0] is total else self._staging.shared(total, len(roots), filled=False)
        meeting = self.board.meet(in_words(total), [*shared, place], hurry=hurry)
        self._work(meeting, reduction, total.dtype)()
        return place

    def _work(self, meeting: Meeting, reduction: Reduction, dtype: torch.dtype) -> Work:
        """The additions of this worker's slice; prepared once for the same memory and the same tree."""
        if meeting.prepared is None or meeting.prepared[0] is not reduction:
            meeting.prepared = (reduction, _prepare(meeting, reduction, dtype, self._rank))
        work: Work = meeting.prepared[1]
        return work


def _suits(reduction: Reduction, total: torch.Tensor) -> bool:
    """Whether the sum is on the CPU, and all roots, with the place for the sum, find room on one row of the board."""
    return total.device.type == "cpu" and max(reduction.roots_of) < MAX_TENSORS


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype) -> bytes:
    return str(dtype).removeprefix("torch.").encode()


def in_words(total: torch.Tensor) -> bytes:
    """What workers who reduce together must have in common: the dtype; sizes stand on the board anyway."""
    return _name(total.dtype)


def refuse_difference(meeting: Meeting, rank: int) -> None:
    """Raises the same on every worker if they are about to add different things. Nothing has been added."""
    facts = {
        member: f"{meeting.memory[member][-1].numel()} bytes of {words.decode()}"
        for member, words in meeting.words.items()
    }
    other = next((member for member, fact in facts.items() if fact != facts[rank]), None)
    if other is not None:
        raise Disagreement("the bucket to reduce", rank, facts[rank], other, facts[other])


def _prepare(meeting: Meeting, reduction: Reduction, dtype: torch.dtype, rank: int) -> Work:
    refuse_difference(meeting, rank)
    typed = {member: [shown.view(dtype) for shown in memory] for member, memory in meeting.memory.items()}
    members = sorted(typed)
    part = slices(typed[rank][-1].numel(), len(members))[members.index(rank)]
    span = slice(part.start, part.stop)
    values = {Root(member, index): root[span] for member in members for index, root in enumerate(typed[member][:-1])}
    places = [typed[member][-1][span] for member in (rank, *(member for member in members if member != rank))]
    return summation(reduction.tree, values, places)
