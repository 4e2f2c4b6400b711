"""Broadcasts: one worker has everything, then all have it."""

from functools import lru_cache

from lockstep.errors import BadArgument
from lockstep.wire.schedules.circulant import doubling_all_gather
from lockstep.wire.schedules.schedule import Round, Schedule, Send, busy


@lru_cache(maxsize=256)
def direct_broadcast(num_workers: int, source: int = 0) -> Schedule:
    """The source sends everything to everyone.

    Cost: rounds = min(W-1, 1); bytes = (W-1)*P
    """
    _check_source(source, num_workers)
    sends = tuple(Send(source, target, part=0) for target in range(num_workers) if target != source)
    return Schedule(num_workers, busy(Round(sends)), "broadcast", 1, source=source)


@lru_cache(maxsize=256)
def binomial(num_workers: int, source: int = 0) -> Schedule:
    """Whoever has it sends it to one that has not: the number of those who have it doubles in every round.

    Cost: rounds = ceil(log2(W)); bytes = ceil(log2(W))*P
    """
    _check_source(source, num_workers)
    rounds = tuple(_spread(num_workers, source, 1 << k) for k in range((num_workers - 1).bit_length()))
    return Schedule(num_workers, rounds, "broadcast", 1, source=source)


@lru_cache(maxsize=256)
def scatter_gather(num_workers: int, source: int = 0) -> Schedule:
    """Scatters the parts along a binomial tree, then gathers them all, after van de Geijn. For long messages.

    The source sends everything about twice, however many workers there are.

    Cost: rounds = 2*ceil(log2(W)); bytes = 2*(W-1)/W*P
    """
    _check_source(source, num_workers)
    distances = [1 << k for k in reversed(range((num_workers - 1).bit_length()))]
    scatter = tuple(_scatter(num_workers, source, distance) for distance in distances)
    held = {(send.target, send.part) for moves in scatter for send in moves.sends}
    held |= {(source, part) for part in range(num_workers)}
    gather = tuple(_without(moves, held) for moves in doubling_all_gather(num_workers).rounds)
    return Schedule(num_workers, scatter + gather, "broadcast", num_workers, source=source)


def _spread(num_workers: int, source: int, distance: int) -> Round:
    """The first `distance` workers, counted from the source, each send to the one `distance` places on."""
    reached = range(distance, min(2 * distance, num_workers))
    return Round(
        tuple(
            Send((source + place - distance) % num_workers, (source + place) % num_workers, part=0) for place in reached
        )
    )


def _scatter(num_workers: int, source: int, distance: int) -> Round:
    """Every second `distance`-th worker, counted from the source, hands on the upper half of the parts it has."""
    return Round(
        tuple(
            Send(
                (source + place - distance) % num_workers, (source + place) % num_workers, (source + part) % num_workers
            )
            for place in range(distance, num_workers, 2 * distance)
            for part in range(place, min(place + distance, num_workers))
        )
    )


def _without(moves: Round, held: set[tuple[int, int]]) -> Round:
    """The sends of a round that bring a worker a part which it did not hold."""
    return Round(tuple(send for send in moves.sends if (send.target, send.part) not in held))


def _check_source(source: int, num_workers: int) -> None:
    if source not in range(num_workers):
        raise BadArgument(f"source must be one of the workers 0 to {num_workers - 1}, not {source}")
