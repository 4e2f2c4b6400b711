"""Halving and doubling on a circle: log2(W) rounds, rounded up, and the fewest bytes for any number of workers."""

from functools import lru_cache

from lockstep.wire.schedules.reversal import backwards
from lockstep.wire.schedules.schedule import Round, Schedule, Send


@lru_cache(maxsize=256)
def circulant(num_workers: int) -> Schedule:
    """All-reduce on a circulant graph, after Bruck and Träff: `halving_reduce_scatter`, then `doubling_all_gather`.

    Cost: rounds = 2*ceil(log2(W)); bytes = 2*(W-1)/W*P
    """
    rounds = halving_reduce_scatter(num_workers).rounds + doubling_all_gather(num_workers).rounds
    return Schedule(num_workers, rounds, "all_reduce", num_workers)


@lru_cache(maxsize=256)
def halving_reduce_scatter(num_workers: int) -> Schedule:
    """Reduce-scatter: `doubling_all_gather` backwards. With W a power of two, half of what is left goes each round.

    It needs no folding of extra workers, so it serves instead of the hypercube's halving for every W.

    Cost: rounds = ceil(log2(W)); bytes = (W-1)/W*P
    """
    rounds = backwards(doubling_all_gather(num_workers).rounds)
    return Schedule(num_workers, rounds, "reduce_scatter", num_workers)


@lru_cache(maxsize=256)
def doubling_all_gather(num_workers: int) -> Schedule:
    """All-gather after Bruck et al. (1997): in round k, everyone sends all it has to the worker 2^k places before it.

    Worker i then has parts i to i + 2^(k+1) - 1, counted around the circle. The last round sends only what is
    missing.

    Cost: rounds = ceil(log2(W)); bytes = (W-1)/W*P
    """
    distances = [1 << k for k in range((num_workers - 1).bit_length())]
    rounds = tuple(_step(num_workers, distance) for distance in distances)
    return Schedule(num_workers, rounds, "all_gather", num_workers)


def _step(num_workers: int, distance: int) -> Round:
    num_sent = min(distance, num_workers - distance)
    return Round(
        tuple(
            Send(rank, (rank - distance) % num_workers, part=(rank + ahead) % num_workers)
            for rank in range(num_workers)
            for ahead in range(num_sent)
        )
    )
