"""Broadcasts: one worker has everything, then all have it."""

from functools import lru_cache

from lockstep.errors import BadArgument
from lockstep.programs.explain.schedules.halving import doubling_all_gather
from lockstep.wire.schedules.schedule import Cost, Schedule, ScheduleRound, SendPart, busy

DIRECT_BROADCAST = Cost("min(W-1, 1)", "(W-1)*P")
BINOMIAL = Cost("ceil(log2(W))", "ceil(log2(W))*P")
SCATTER_GATHER = Cost("2*ceil(log2(W))", "2*(W-1)/W*P")


@lru_cache(maxsize=256)
def direct_broadcast(num_workers: int, source: int = 0) -> Schedule:
    """The source sends everything to every worker."""
    _check_source(source, num_workers)
    sends = tuple(SendPart(source, target, part=0) for target in range(num_workers) if target != source)
    return Schedule(num_workers, busy(ScheduleRound(sends)), "broadcast", 1, source=source)


@lru_cache(maxsize=256)
def binomial(num_workers: int, source: int = 0) -> Schedule:
    """Each worker that holds the data sends it to one that does not: their number doubles in every round."""
    _check_source(source, num_workers)
    rounds = tuple(_spread(num_workers, source, 1 << k) for k in range((num_workers - 1).bit_length()))
    return Schedule(num_workers, rounds, "broadcast", 1, source=source)


@lru_cache(maxsize=256)
def scatter_gather(num_workers: int, source: int = 0) -> Schedule:
    """Scatters the parts along a binomial tree, then gathers them all, after van de Geijn. For long messages.

    The source sends everything about twice, however many workers there are.
    """
    _check_source(source, num_workers)
    distances = [1 << k for k in reversed(range((num_workers - 1).bit_length()))]
    scatter = tuple(_scatter(num_workers, source, distance) for distance in distances)
    held = {(send.target, send.part) for moves in scatter for send in moves.sends}
    held |= {(source, part) for part in range(num_workers)}
    gather = tuple(_without(moves, held) for moves in doubling_all_gather(num_workers).rounds)
    return Schedule(num_workers, scatter + gather, "broadcast", num_workers, source=source)


def _spread(num_workers: int, source: int, distance: int) -> ScheduleRound:
    """The first `distance` workers, counted from the source, each send to the one `distance` places on."""
    reached = range(distance, min(2 * distance, num_workers))
    return ScheduleRound(
        tuple(
            SendPart((source + place - distance) % num_workers, (source + place) % num_workers, part=0)
            for place in reached
        )
    )


def _scatter(num_workers: int, source: int, distance: int) -> ScheduleRound:
    """Every second `distance`-th worker, counted from the source, passes on the upper half of the parts it has."""
    return ScheduleRound(
        tuple(
            SendPart(
                (source + place - distance) % num_workers, (source + place) % num_workers, (source + part) % num_workers
            )
            for place in range(distance, num_workers, 2 * distance)
            for part in range(place, min(place + distance, num_workers))
        )
    )


def _without(moves: ScheduleRound, held: set[tuple[int, int]]) -> ScheduleRound:
    """The sends of a round that bring a worker a part which it did not hold."""
    return ScheduleRound(tuple(send for send in moves.sends if (send.target, send.part) not in held))


def _check_source(source: int, num_workers: int) -> None:
    if source not in range(num_workers):
        raise BadArgument(f"source must be one of the workers 0 to {num_workers - 1}, not {source}")
