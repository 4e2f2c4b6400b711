"""Halving and doubling: few rounds and few bytes, in a hypercube or, for any number of workers, on a circle."""

from dataclasses import replace
from functools import lru_cache

from lockstep.wire.schedules.schedule import Cost, Schedule, ScheduleRound, SendPart, busy

HALVING_DOUBLING = Cost("2*ceil(log2(W))", "(2*(p-1)/p + (W > p))*P", where="p = 2**floor(log2(W))")
CIRCULANT = Cost("2*ceil(log2(W))", "2*(W-1)/W*P")
HALVING_REDUCE_SCATTER = DOUBLING_ALL_GATHER = Cost("ceil(log2(W))", "(W-1)/W*P")


def backwards(rounds: tuple[ScheduleRound, ...]) -> tuple[ScheduleRound, ...]:
    """The same sends from last to first, each the other way round and adding.

    In an all-gather a part spreads from its owner along a tree. Backwards, that tree brings every worker's value
    of the part to the owner, each exactly once: a reduce-scatter with as many rounds and as many bytes.
    """
    return tuple(
        ScheduleRound(tuple(replace(send, source=send.target, target=send.source, adds=True) for send in moves.sends))
        for moves in reversed(rounds)
    )


# -- in a hypercube ------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def halving_doubling(num_workers: int) -> Schedule:
    """All-reduce after Rabenseifner (2004): halve what is left to add in every round, then double what is known.

    Works in a hypercube of p workers, p a power of two. The others fold their values into a neighbour's first
    and get the result from it at the end.
    """
    size = 1 << num_workers.bit_length() - 1
    num_folded = num_workers - size
    corners = [2 * i if i < num_folded else i + num_folded for i in range(size)]
    doubling = _doubling(corners)
    unfold = ScheduleRound(tuple(SendPart(2 * i, 2 * i + 1, part) for i in range(num_folded) for part in range(size)))
    rounds = busy(*backwards((*doubling, unfold)), *doubling, unfold)
    return Schedule(num_workers, rounds, "all_reduce", size)


def _doubling(corners: list[int]) -> tuple[ScheduleRound, ...]:
    """All-gather in a hypercube: in the round of `distance`, corner i swaps its block with corner i XOR distance."""
    distances = [1 << bit for bit in range(len(corners).bit_length() - 1)]
    return tuple(
        ScheduleRound(
            tuple(
                SendPart(rank, corners[corner ^ distance], part)
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


# -- on a circle ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def circulant(num_workers: int) -> Schedule:
    """All-reduce on a circulant graph, after Bruck and Träff: `halving_reduce_scatter`, then `doubling_all_gather`."""
    rounds = halving_reduce_scatter(num_workers).rounds + doubling_all_gather(num_workers).rounds
    return Schedule(num_workers, rounds, "all_reduce", num_workers)


@lru_cache(maxsize=256)
def halving_reduce_scatter(num_workers: int) -> Schedule:
    """Reduce-scatter: `doubling_all_gather` backwards. With W a power of two, half of what is left goes each round.

    It needs no folding of extra workers, so it serves instead of the hypercube's halving for every W.
    """
    rounds = backwards(doubling_all_gather(num_workers).rounds)
    return Schedule(num_workers, rounds, "reduce_scatter", num_workers)


@lru_cache(maxsize=256)
def doubling_all_gather(num_workers: int) -> Schedule:
    """All-gather after Bruck et al. (1997): in round k, each worker sends all it has to the one 2^k places before it.

    Worker i then has parts i to i + 2^(k+1) - 1, counted around the circle. The last round sends only what is
    missing.
    """
    distances = [1 << k for k in range((num_workers - 1).bit_length())]
    rounds = tuple(_doubling_round(num_workers, distance) for distance in distances)
    return Schedule(num_workers, rounds, "all_gather", num_workers)


def _doubling_round(num_workers: int, distance: int) -> ScheduleRound:
    num_sent = min(distance, num_workers - distance)
    return ScheduleRound(
        tuple(
            SendPart(rank, (rank - distance) % num_workers, part=(rank + ahead) % num_workers)
            for rank in range(num_workers)
            for ahead in range(num_sent)
        )
    )
