"""Recursive halving and doubling in a hypercube: log2(W) rounds with the fewest bytes if W is a power of two."""

from functools import lru_cache

from lockstep.wire.schedules.reversal import backwards
from lockstep.wire.schedules.schedule import Round, Schedule, Send, busy


@lru_cache(maxsize=256)
def halving_doubling(num_workers: int) -> Schedule:
    """All-reduce after Rabenseifner (2004): halve what is left to add in every round, then double what is known.

    Works in a hypercube of p workers, p a power of two. The others fold their values into a neighbour's first
    and get the result from it at the end.

    Cost: p = 2**floor(log2(W)); rounds = 2*ceil(log2(W)); bytes = (2*(p-1)/p + (W > p))*P
    """
    size = 1 << num_workers.bit_length() - 1
    num_folded = num_workers - size
    corners = [2 * i if i < num_folded else i + num_folded for i in range(size)]
    doubling = _doubling(corners)
    unfold = Round(tuple(Send(2 * i, 2 * i + 1, part) for i in range(num_folded) for part in range(size)))
    rounds = busy(*backwards((*doubling, unfold)), *doubling, unfold)
    return Schedule(num_workers, rounds, "all_reduce", size)


def _doubling(corners: list[int]) -> tuple[Round, ...]:
    """All-gather in a hypercube: in the round of `distance`, corner i swaps its block with corner i XOR distance."""
    distances = [1 << bit for bit in range(len(corners).bit_length() - 1)]
    return tuple(
        Round(
            tuple(
                Send(rank, corners[corner ^ distance], part)
                for corner, rank in enumerate(corners)
                for part in _block(corner, distance)
            )
        )
        for distance in distances
    )


def _block(corner: int, size: int) -> range:
    """The aligned block of `size` parts around part `corner`."""
    first = corner - corner % size
    return range(first, first + size)
