"""The meeting at the beginning of an operation: what all members ask for is the same, or all raise."""

from dataclasses import dataclass

import torch

from lockstep.torch_backend.call import CollectiveCall, check, decode, encode
from lockstep.torch_backend.rounds import Rounds
from lockstep.wire.shared.board import Meeting
from lockstep.wire.shared.kernels import Work


@dataclass
class Agreed:
    """What the members ask for, by rank; and what a program prepared for the next time they ask for the same."""

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
