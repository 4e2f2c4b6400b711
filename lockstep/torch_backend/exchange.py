"""Collectives that move bytes and change none: broadcast, gather, all-gather, scatter, all-to-all.

# Note [Bytes moved in an exchange]
# A member puts what it gives in a row, copies the row through its staging memory in chunks that fit a cache, and
# every member copies what it takes straight to its place: two copies of each byte, the fewest for memory that peers
# cannot see. What a member gives to itself is copied once. What goes to all members alike (broadcast, all-gather) is
# in the row once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from lockstep.torch_backend.call import CollectiveCall
from lockstep.torch_backend.flat import MemberParts
from lockstep.torch_backend.rounds import Rounds, agree
from lockstep.wire.shared.reducer import SPIN_BYTES

CHUNK_BYTES = 4 * 1024 * 1024
"""How much of a member's row is staged at a time."""

SAME_TO_ALL = ("broadcast", "all_gather")


@dataclass(frozen=True)
class RowLayout:
    """The places in the giver's row of bytes, by tensor and taker. Nothing for the giver itself."""

    starts: dict[tuple[int, int], int]
    num_bytes: int


@lru_cache(maxsize=1024)
def row_layout(call: CollectiveCall, giver: int, num_members: int) -> RowLayout:
    starts, end = {}, 0
    takers = [member for member in range(num_members) if member != giver]
    for tensor, dtype in enumerate(call.dtypes):
        sizes = call.gives[tensor * num_members : (tensor + 1) * num_members]
        longest = 0
        for taker in takers:
            starts[tensor, taker] = end
            num_bytes = sizes[taker] * getattr(torch, dtype).itemsize
            longest = max(longest, num_bytes)
            end += 0 if call.operation in SAME_TO_ALL else num_bytes
        end += longest if call.operation in SAME_TO_ALL else 0
    return RowLayout(starts, end)


@dataclass(frozen=True)
class Piece:
    """Memory for the bytes of a row from `start` on."""

    start: int
    memory: torch.Tensor

    def inside(self, chunk: range) -> tuple[torch.Tensor, slice]:
        """The piece's bytes in a chunk of the row, and where they are in the chunk."""
        first, last = max(self.start, chunk.start), min(self.start + self.memory.numel(), chunk.stop)
        last = max(first, last)
        return self.memory[first - self.start : last - self.start], slice(first - chunk.start, last - chunk.start)


def exchange(rounds: Rounds, call: CollectiveCall, given: Sequence[MemberParts], taken: Sequence[MemberParts]) -> None:
    """Collective. Afterwards every member has what it takes. See Note [Bytes moved in an exchange]."""
    layout = row_layout(call, rounds.rank, len(rounds.members))
    may_overlap = call.operation == "all_to_all" and layout.num_bytes > CHUNK_BYTES
    sources = [parts.open() for parts in (_set_apart(given, taken) if may_overlap else given)]
    targets = [parts.open() for parts in taken]
    outgoing = list(_pieces(layout, [source.of for source in sources]).values())
    num_chunks, index = 1, 0
    incoming: list[tuple[int, Piece]] = []
    while index < num_chunks:
        chunk = range(index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES)
        _stage(rounds, outgoing, chunk, layout.num_bytes)
        if index == 0:
            meeting, agreed = agree(rounds, call, spin=layout.num_bytes <= SPIN_BYTES)
            layouts = {m: row_layout(theirs, m, len(rounds.members)) for m, theirs in agreed.calls.items()}
            num_chunks = max(1, -(-max(layout.num_bytes for layout in layouts.values()) // CHUNK_BYTES))
            incoming = _incoming(rounds.rank, layouts, [target.of for target in targets])
            _keep_own(rounds.rank, [source.of for source in sources], [target.of for target in targets])
        else:
            meeting = rounds.meet()
        for peer, piece in incoming:
            memory, place = piece.inside(chunk)
            if memory.numel():
                memory.copy_(meeting.memory[peer][0][place])
        index += 1
    for target in targets:
        target.finish()


def _set_apart(given: Sequence[MemberParts], taken: Sequence[MemberParts]) -> list[MemberParts]:
    """What is given, copied where it would be overwritten by a chunk before it has been sent."""
    written = {tensor.untyped_storage().data_ptr() for parts in taken for tensor in parts.tensors}
    overwritten = [any(t.untyped_storage().data_ptr() in written for t in parts.tensors) for parts in given]
    return [
        parts.copied() if is_overwritten else parts for parts, is_overwritten in zip(given, overwritten, strict=True)
    ]


def _stage(rounds: Rounds, outgoing: list[Piece], chunk: range, row_bytes: int) -> None:
    staging = rounds.staging(max(0, min(row_bytes, chunk.stop) - chunk.start))
    for piece in outgoing:
        memory, place = piece.inside(chunk)
        if memory.numel():
            staging[place].copy_(memory)


def _pieces(layout: RowLayout, parts: list[list[torch.Tensor]]) -> dict[int, Piece]:
    """The pieces of one giver's row, by their start; what goes to several members is there once."""
    pieces: dict[int, Piece] = {}
    for (tensor, taker), start in layout.starts.items():
        memory = parts[tensor][taker]
        if memory.numel():
            pieces[start] = Piece(start, memory.view(torch.uint8))
    return pieces


def _incoming(rank: int, layouts: dict[int, RowLayout], parts: list[list[torch.Tensor]]) -> list[tuple[int, Piece]]:
    return [
        (peer, Piece(layout.starts[tensor, rank], by_member[peer].view(torch.uint8)))
        for peer, layout in layouts.items()
        for tensor, by_member in enumerate(parts)
        if peer != rank and by_member[peer].numel()
    ]


def _keep_own(rank: int, given: list[list[torch.Tensor]], taken: list[list[torch.Tensor]]) -> None:
    for source, target in zip(given, taken, strict=True):
        if source[rank].data_ptr() != target[rank].data_ptr():
            target[rank].copy_(source[rank])
