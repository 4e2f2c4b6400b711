"""Reduction in shared memory, in place: every worker adds its slice of all workers' roots and writes it to all.

# Note [Direct slices in shared memory]
# Buckets are in shared memory from the start, so nothing is sent. The workers meet on the board, where each shows its
# roots and the place for the sum. Each adds its own slice over all roots in tree order and writes it to every worker's
# place; then comes the closing barrier. Only its own worker reads or writes a slice in between, so the sum may
# overwrite a root. Memory is read once and written once per worker: 2·W·P bytes, the least there is.
# A reduce-scatter writes each slice to its own worker only, an all-gather copies each slice once for every peer.

# Note [Closing late]
# After the closing barrier, every worker's bucket holds every slice. For a step's last bucket the thread that waits for
# the step calls the barrier, when all that the step needs besides the sum is there too: so it is also the commit of
# the step, which needs no further round.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from lockstep.errors import Disagreement
from lockstep.lanes import Reduction, Root
from lockstep.wire.reducer import Reducer, Slices, check_slices
from lockstep.wire.schedules import slices as even_slices
from lockstep.wire.shared.board import MAX_TENSORS, Board, Meeting
from lockstep.wire.shared.kernels import Work, summation
from lockstep.wire.shared.memory import Staging

SPIN_BYTES = 256 * 1024
"""Up to this size a worker stays awake for a moment while it waits: waking up would take longer than the sum."""


class SharedMemoryReducer(Reducer):
    """A Reducer for the workers of one host. Tensors that it did not allocate are copied in and out.

    What is not on the CPU, or is spread over thousands of roots, is sent: by the `executor`.
    """

    def __init__(self, board: Board, executor: Reducer, rank: int) -> None:
        self.board = board
        self._staging = Staging(board.memory)
        self._executor = executor
        self._rank = rank
        self._is_open = False

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._staging.allocate(num_elements, dtype, device)

    def release(self, tensor: torch.Tensor) -> None:
        self._staging.release(tensor)

    def reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """See Note [Direct slices in shared memory]. Two signals to each peer."""
        self.closing_barrier()
        if not _fits_board(reduction, total):
            self._executor.reduce(reduction, roots, total)
        elif total.numel() > 0:
            spin = total.nbytes <= SPIN_BYTES
            place = self._add(reduction, roots, total, spin)
            self.board.closing_barrier(spin=spin)
            if place.data_ptr() != total.data_ptr():
                total.copy_(place)

    def reduce_unclosed(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """See Note [Closing late]. One signal to each peer."""
        self.closing_barrier()
        if not _fits_board(reduction, total):
            self._executor.reduce(reduction, roots, total)
        elif total.numel() > 0:
            self._add(reduction, roots, total, spin=total.nbytes <= SPIN_BYTES)
            self._is_open = True

    def reduce_once(
        self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor, *, closes: bool
    ) -> None:
        """Collective. As `reduce`, where `total` is memory that all workers see: each writes `own_parts` of it.

        Without `closes` it is as `reduce_unclosed`. Up to two signals to each peer.
        """
        self.closing_barrier()
        if not _fits_board(reduction, total):
            self._executor.reduce(reduction, roots, whole := torch.empty_like(total))
            for part in self.own_parts(total.numel()):
                total[part] = whole[part]
            return
        spin = total.nbytes <= SPIN_BYTES
        shared = [self._staging.shared(root, slot, filled=True) for slot, root in enumerate(roots)]
        meeting = self.board.meet(facts_of_place(total.nbytes, total.dtype, total.storage_offset()), shared, spin=spin)
        self._work_once(meeting, reduction, total)()
        self._is_open = True
        if closes:
            self._is_open = False
            self.board.closing_barrier(spin=spin)

    def own_parts(self, num_elements: int) -> list[slice]:
        """The elements that this worker writes where a sum stands once."""
        members = self.board.members
        part = even_slices(num_elements, len(members))[members.index(self._rank)]
        return [slice(part.start, part.stop)]

    def closing_barrier(self) -> bool:
        if not self._is_open:
            return False
        self._is_open = False
        self.board.closing_barrier(spin=True)
        return True

    def reduce_scatter(
        self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor, slices: Slices
    ) -> None:
        """See Note [Direct slices in shared memory]. Two signals to each peer."""
        check_slices(slices, total.numel(), len(self.board.members))
        self.closing_barrier()
        if not _fits_board(reduction, total):
            self._executor.reduce_scatter(reduction, roots, total, slices)
        elif total.numel() > 0:
            spin = total.nbytes <= SPIN_BYTES
            shared = [self._staging.shared(root, slot, filled=True) for slot, root in enumerate(roots)]
            meeting = self._meet(
                _facts_of_slices("reduce_scatter", total.nbytes, total.dtype, tuple(slices)), shared, spin
            )
            own = slices[self._rank]
            values = roots_shown(meeting, total.dtype, slice(own.start, own.stop))
            summation(reduction.tree, values, [total[own.start : own.stop]])()
            self.board.closing_barrier(spin=spin)

    def all_gather(self, total: torch.Tensor, slices: Slices) -> None:
        """Two signals to each peer; each worker copies the others' slices into its own `total`."""
        check_slices(slices, total.numel(), len(self.board.members))
        self.closing_barrier()
        if total.device.type != "cpu":
            self._executor.all_gather(total, slices)
        elif total.numel() > 0:
            spin = total.nbytes <= SPIN_BYTES
            shared, own = self._staging.shared(total, 0, filled=False), slices[self._rank]
            if shared.data_ptr() != total.data_ptr():
                shared[own.start : own.stop] = total[own.start : own.stop]
            meeting = self._meet(
                _facts_of_slices("all_gather", total.nbytes, total.dtype, tuple(slices)), [shared], spin
            )
            for member, part in zip(self.board.members, slices, strict=True):
                if member != self._rank:
                    theirs = meeting.memory[member][0].view(total.dtype)
                    total[part.start : part.stop] = theirs[part.start : part.stop]
            self.board.closing_barrier(spin=spin)

    def awaited(self) -> list[int]:
        return self.board.awaited()

    def close(self) -> None:
        self.board.memory.neighbours.close()
        self.board.memory.close()

    def _add(
        self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor, spin: bool
    ) -> torch.Tensor:
        """Adds this worker's slice. Returns the shared memory that holds the sum after the closing barrier."""
        shared, place = self._staging.roots_and_place(roots, total)
        meeting = self.board.meet(facts_of(total.nbytes, total.dtype), [*shared, place], spin=spin)
        self._work(meeting, reduction, total.dtype)()
        return place

    def _work(self, meeting: Meeting, reduction: Reduction, dtype: torch.dtype) -> Work:
        """The additions of this worker's slice; prepared once for the same memory and the same tree."""
        if meeting.prepared is None or meeting.prepared[0] is not reduction:
            meeting.prepared = (reduction, _prepare(meeting, reduction, dtype, self._rank))
        work: Work = meeting.prepared[1]
        return work

    def _work_once(self, meeting: Meeting, reduction: Reduction, total: torch.Tensor) -> Work:
        """The additions of this worker's part of a sum that stands once; prepared as in `_work`."""
        if meeting.prepared is None or meeting.prepared[:2] != (reduction, total.data_ptr()):
            refuse_difference(meeting, self._rank)
            (own,) = self.own_parts(total.numel())
            work = summation(reduction.tree, roots_shown(meeting, total.dtype, own), [total[own]])
            meeting.prepared = (reduction, total.data_ptr(), work)
        prepared: Work = meeting.prepared[2]
        return prepared

    def _meet(self, facts: bytes, tensors: Sequence[torch.Tensor], spin: bool) -> Meeting:
        meeting = self.board.meet(facts, tensors, spin=spin)
        refuse_difference(meeting, self._rank)
        return meeting


def _fits_board(reduction: Reduction, total: torch.Tensor) -> bool:
    """Whether the sum is on the CPU, and all roots and the place for the sum fit on one row of the board."""
    return total.device.type == "cpu" and max(reduction.roots_of) < MAX_TENSORS


@lru_cache(maxsize=1024)
def facts_of(num_bytes: int, dtype: torch.dtype) -> bytes:
    """What must be equal on all workers that reduce together."""
    return f"{num_bytes} bytes of {str(dtype).removeprefix('torch.')}".encode()


@lru_cache(maxsize=1024)
def facts_of_place(num_bytes: int, dtype: torch.dtype, place: int) -> bytes:
    return facts_of(num_bytes, dtype) + f", once, at {place}".encode()


@lru_cache(maxsize=1024)
def _facts_of_slices(collective: str, num_bytes: int, dtype: torch.dtype, slices: tuple[range, ...]) -> bytes:
    bounds = " ".join(f"{part.start}:{part.stop}" for part in slices)
    return facts_of(num_bytes, dtype) + f", {collective} in slices {bounds}".encode()


def refuse_difference(meeting: Meeting, rank: int) -> None:
    """Raises a Disagreement on every worker if they are about to add different things, before anything is added."""
    facts = meeting.words
    other = next((member for member, fact in facts.items() if fact != facts[rank]), None)
    if other is not None:
        raise Disagreement("the bucket to reduce", rank, facts[rank].decode(), other, facts[other].decode())


def _prepare(meeting: Meeting, reduction: Reduction, dtype: torch.dtype, rank: int) -> Work:
    refuse_difference(meeting, rank)
    members = sorted(meeting.memory)
    places = {member: memory[-1].view(dtype) for member, memory in meeting.memory.items()}
    part = even_slices(places[rank].numel(), len(members))[members.index(rank)]
    span = slice(part.start, part.stop)
    own_first = (rank, *(member for member in members if member != rank))
    return summation(
        reduction.tree, roots_shown(meeting, dtype, span, num_places=1), [places[member][span] for member in own_first]
    )


def roots_shown(
    meeting: Meeting, dtype: torch.dtype, span: slice = slice(None), num_places: int = 0
) -> dict[Root, torch.Tensor]:
    """A span of every worker's roots; behind them, a worker shows `num_places` tensors for the sum."""
    return {
        Root(member, index): root.view(dtype)[span]
        for member, memory in sorted(meeting.memory.items())
        for index, root in enumerate(memory[: len(memory) - num_places])
    }
