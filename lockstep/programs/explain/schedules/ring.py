"""Rings: every worker sends to the next only. Many rounds, the fewest bytes, and each link used evenly."""

from functools import lru_cache

from lockstep.wire.schedules.schedule import Cost, Schedule, ScheduleRound, SendPart

RING = Cost("2*(W-1)", "2*(W-1)/W*P")
RING_REDUCE_SCATTER = RING_ALL_GATHER = Cost("W-1", "(W-1)/W*P")


@lru_cache(maxsize=256)
def ring(num_workers: int) -> Schedule:
    """All-reduce: the parts travel once around and are added, then once more and are copied."""
    rounds = ring_reduce_scatter(num_workers).rounds + ring_all_gather(num_workers).rounds
    return Schedule(num_workers, rounds, "all_reduce", num_workers)


@lru_cache(maxsize=256)
def ring_reduce_scatter(num_workers: int) -> Schedule:
    """Reduce-scatter: part i leaves worker i+1, grows at every stop and ends, complete, at worker i."""
    rounds = tuple(_step(num_workers, behind=step + 1, adds=True) for step in range(num_workers - 1))
    return Schedule(num_workers, rounds, "reduce_scatter", num_workers)


@lru_cache(maxsize=256)
def ring_all_gather(num_workers: int) -> Schedule:
    """All-gather: each worker passes on what it received in the round before, its own part first."""
    rounds = tuple(_step(num_workers, behind=step, adds=False) for step in range(num_workers - 1))
    return Schedule(num_workers, rounds, "all_gather", num_workers)


def _step(num_workers: int, behind: int, adds: bool) -> ScheduleRound:
    """Each worker sends to the next the part that is `behind` places before its own."""
    return ScheduleRound(
        tuple(
            SendPart(rank, (rank + 1) % num_workers, part=(rank - behind) % num_workers, adds=adds)
            for rank in range(num_workers)
        )
    )
