"""Binary trees: up to the root and down again, in pipelined chunks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from lockstep.errors import BadArgument
from lockstep.wire.schedules.schedule import Cost, Schedule, ScheduleRound, SendPart

TREE = Cost("2*ceil(log2(W)) + floor(log2(W)) + N - 2 if W > 1 else 0", "min(W-1, 3)*P")
DOUBLE_TREE = Cost("2*ceil(log2(W)) + floor(log2(W)) + N/2 - 2 if W > 1 else 0", "min(W-1, W/2, 2)*P")


@lru_cache(maxsize=256)
def tree(num_workers: int, num_chunks: int = 1) -> Schedule:
    """All-reduce: values are added on the way up a binary tree, and the sum is copied on the way down.

    A worker takes one child's chunk after the other's, which costs the way up more rounds than the way down. N
    is the number of chunks: while one is at the root, the next ones are already on their way.
    """
    _check_chunks(num_chunks, multiple_of=1)
    rounds = _rounds(_train(num_workers, range(num_chunks), lambda rank: rank))
    return Schedule(num_workers, rounds, "all_reduce", num_chunks)


@lru_cache(maxsize=256)
def double_tree(num_workers: int, num_chunks: int = 2) -> Schedule:
    """All-reduce after Sanders, Speck and Träff (2009): two trees at once, each for one half of the chunks.

    A leaf of one tree adds and forwards in the other, so that no worker sends much more than its share:
    a single tree leaves half of its workers with little to do. N is the number of chunks of both.
    """
    _check_chunks(num_chunks, multiple_of=2)
    half = num_chunks // 2
    first = _train(num_workers, range(half), lambda rank: rank)
    second = _train(num_workers, range(half, num_chunks), lambda rank: _complement(rank, num_workers))
    return Schedule(num_workers, _rounds([*first, *second]), "all_reduce", num_chunks)


def parent(rank: int, num_workers: int) -> int:
    """The parent in a binary tree whose leaves are the odd ranks; the root is 0, with one child.

    The lowest set bit of a rank is its height: the parent is the nearest rank that is one higher.
    """
    low = rank & -rank
    upper = (rank ^ low) | low << 1
    return upper if upper < num_workers else rank ^ low


def _complement(rank: int, num_workers: int) -> int:
    """The place of a rank of the first tree in the second: odd ranks, the leaves, change places with even ones."""
    return num_workers - 1 - rank if num_workers % 2 == 0 else (rank + 1) % num_workers


def _train(num_workers: int, chunks: range, place: Callable[[int], int]) -> Iterator[tuple[int, SendPart]]:
    """Every send of a tree with its round; `place` maps a rank of the tree to a worker."""
    first_up, turn = _climb(num_workers)
    for rank in range(1, num_workers):
        lower, upper = place(rank), place(parent(rank, num_workers))
        first_down = turn + _depth(rank, num_workers) - 1
        for position, chunk in enumerate(chunks):
            yield first_up[rank] + position, SendPart(lower, upper, chunk, adds=True)
            yield first_down + position, SendPart(upper, lower, chunk)


def _climb(num_workers: int) -> tuple[dict[int, int], int]:
    """The round in which each rank sends its first chunk up, and the round in which the root has it complete."""
    children = defaultdict(list)
    for rank in range(1, num_workers):
        children[parent(rank, num_workers)].append(rank)
    first_up = dict[int, int]()

    def complete(rank: int) -> int:
        now = 0
        for ready, child in sorted((complete(child), child) for child in children[rank]):
            first_up[child] = max(ready, now)
            now = first_up[child] + 1
        return now

    return first_up, complete(0)


def _depth(rank: int, num_workers: int) -> int:
    return 0 if rank == 0 else 1 + _depth(parent(rank, num_workers), num_workers)


def _rounds(sends: Iterable[tuple[int, SendPart]]) -> tuple[ScheduleRound, ...]:
    in_round = defaultdict(list)
    for number, send in sends:
        in_round[number].append(send)
    return tuple(ScheduleRound(tuple(in_round[number])) for number in sorted(in_round))


def _check_chunks(num_chunks: int, multiple_of: int) -> None:
    if num_chunks < 1 or num_chunks % multiple_of:
        allowed = "1 or more" if multiple_of == 1 else "an even number, half for each tree"
        raise BadArgument(f"num_chunks must be {allowed}, not {num_chunks}")
