"""One round after the other: every member fills memory of its own, all meet, every member reads the others' memory.

# Note [Two boards in turn]
# A meeting needs a second signal before its memory may be written again: all must have finished reading. With two
# boards and two staging areas, used in turn, the meeting of the next round is that signal. A member that has reached
# round k+1 has finished reading in round k, so after meeting k+1 the memory of round k is free, and it is written next
# for round k+2. The same holds for the boards' rows and semaphores: a member posts for round k+2 after it took all
# posts of round k+1, which were made after their senders had taken all posts of round k. So a round costs one post to
# each peer, not two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.torch_backend.call import CollectiveCall, check, decode, encode
from lockstep.wire.shared.board import Board, Meeting, open_board
from lockstep.wire.shared.kernels import Work
from lockstep.wire.shared.memory import HostMemory

SMALLEST_STAGING_BYTES = 64 * 1024


class Rounds:
    """A stream of rounds between the members of one group. One thread at a time."""

    def __init__(self, memory: HostMemory, boards: tuple[Board, Board], global_ranks: Sequence[int]) -> None:
        self.rank = memory.neighbours.rank
        self.global_ranks = tuple(global_ranks)
        self.members = memory.neighbours.members
        self._memory = memory
        self._boards = boards
        self._staging = [memory.allocate(SMALLEST_STAGING_BYTES) for _ in boards]
        self._turn = 0

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Memory for this member to fill for the next `meet`, as bytes. See Note [Two boards in turn]."""
        if self._staging[self._turn].numel() < num_bytes:
            self._memory.release(self._staging[self._turn])
            self._staging[self._turn] = self._memory.allocate(1 << (num_bytes - 1).bit_length())
        return self._staging[self._turn]

    def meet(self, words: bytes = b"", *, spin: bool = False) -> Meeting:
        """Collective. Every member's words and staging memory, which may be read until this member meets again."""
        turn = self._turn
        self._turn = 1 - turn
        return self._boards[turn].meet(words, [self._staging[turn]], spin=spin)


def open_rounds(memory: HostMemory, global_ranks: Sequence[int]) -> Rounds:
    """Collective. `global_ranks` are the members' names in errors."""
    return Rounds(memory, (open_board(memory), open_board(memory)), global_ranks)


@dataclass
class Agreed:
    """The members' calls, by rank; and what a program has prepared for the next equal calls."""

    calls: dict[int, CollectiveCall]
    work: Work | None = None
    total: torch.Tensor | None = None


def agree(rounds: Rounds, call: CollectiveCall, *, spin: bool = False) -> tuple[Meeting, Agreed]:
    """Collective. The first meeting of an operation. See Note [Words before data]."""
    meeting = rounds.meet(encode(call), spin=spin)
    if meeting.prepared is None:
        calls = {member: decode(words) for member, words in meeting.words.items()}
        check(calls, rounds.rank, rounds.global_ranks)
        meeting.prepared = Agreed(calls)
    agreed: Agreed = meeting.prepared
    return meeting, agreed
