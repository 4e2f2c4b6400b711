"""Every schedule of the catalogue, for 1 to 64 workers: it is right, and it costs what its formulas say."""

from collections import Counter
from collections.abc import Iterable
from math import isclose
from pathlib import Path

import pytest
from workers import apart

from lockstep.errors import BadArgument
from lockstep.programs.explain.proof import prove
from lockstep.programs.explain.schedules.catalogue import CATALOGUE, Algorithm, Setting, find
from lockstep.wire.network.hosts import host_reduction
from lockstep.wire.schedules import Collective, Schedule
from lockstep.wire.transport import Hosts

ALL = [
    pytest.param(algorithm, id=f"{collective}-{name}")
    for collective, algorithms in CATALOGUE.items()
    for name, algorithm in algorithms.items()
]
ANY_NUMBER = range(1, 65)
SOME_NUMBERS = (*range(1, 18), 31, 32, 33, 63, 64)
BYTES = 1 << 20


def evenly(num_workers: int, per_host: int) -> Hosts:
    """Hosts of `per_host` workers; the last may have fewer."""
    starts = range(0, num_workers, per_host)
    return tuple(tuple(range(first, min(first + per_host, num_workers))) for first in starts)


def largest_equal_hosts(num_workers: int) -> Hosts:
    """Hosts of equal size, as near to a square as the number of workers allows."""
    per_host = max(size for size in range(1, num_workers + 1) if num_workers % size == 0 and size * size <= num_workers)
    return evenly(num_workers, per_host)


def cost(algorithm: Algorithm, schedule: Schedule, hosts: Hosts) -> tuple[float, float]:
    """The rounds and bytes that the cost formulas give."""
    known: dict[str, float] = {"W": schedule.num_workers, "P": BYTES, "N": schedule.num_parts}
    if schedule.reduction:
        known["K"] = max(schedule.reduction.roots_of)
        known["H"], known["C"] = len(hosts), max(map(len, hosts))
        known["G"] = max(map(len, host_reduction(schedule.reduction, hosts).sums_of))
    return algorithm.cost.of(**known)


def most_bytes_sent(schedule: Schedule) -> float:
    sent = Counter(send.source for moves in schedule.rounds for send in moves.sends)
    return max(sent.values(), default=0) * BYTES / schedule.num_parts


up_to_64_workers = pytest.mark.parametrize(
    "numbers", [SOME_NUMBERS, pytest.param(ANY_NUMBER, marks=pytest.mark.soak)], ids=["some", "all"]
)


@up_to_64_workers
@pytest.mark.parametrize("algorithm", ALL)
@apart
def test_every_schedule_is_right_for_1_to_64_workers(algorithm: Algorithm, numbers: Iterable[int]) -> None:
    for num_workers in numbers:
        setting = Setting(num_workers, hosts=evenly(num_workers, 5), source=num_workers // 3)
        prove(algorithm.schedule(setting))


@up_to_64_workers
@pytest.mark.parametrize("algorithm", ALL)
@apart
def test_every_schedule_costs_what_its_formulas_say(algorithm: Algorithm, numbers: Iterable[int]) -> None:
    for num_workers in numbers:
        hosts = largest_equal_hosts(num_workers)
        schedule = algorithm.schedule(Setting(num_workers, hosts=hosts))
        rounds, num_bytes = cost(algorithm, schedule, hosts)
        assert len(schedule.rounds) == rounds, f"{num_workers} workers"
        assert isclose(most_bytes_sent(schedule), num_bytes), f"{num_workers} workers"


@pytest.mark.parametrize("num_chunks", [2, 6])
@pytest.mark.parametrize("name", ["tree", "double-tree"])
@apart
def test_chunks_follow_each_other_without_a_gap(name: str, num_chunks: int) -> None:
    algorithm = find("all_reduce", name)
    for num_workers in ANY_NUMBER:
        schedule = algorithm.schedule(Setting(num_workers, num_chunks=num_chunks))
        assert prove(schedule).rounds == cost(algorithm, schedule, ())[0], f"{num_workers} workers"


@pytest.mark.parametrize("collective", CATALOGUE)
def test_the_page_of_algorithms_has_every_cost_formula(collective: Collective) -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for name, algorithm in CATALOGUE[collective].items():
        row = next(row for row in page.splitlines() if row.startswith(f"| {collective.replace('_', '-')} | {name} |"))
        for assignment in str(algorithm.cost).split("; "):
            written = assignment if assignment.startswith("p ") else assignment.partition(" = ")[2]
            assert f"`{written}`" in row
        assert ("| yes |" in row) == algorithm.exact


def test_the_proof_counts_what_the_busiest_worker_sends() -> None:
    proof = prove(find("broadcast", "direct").schedule(Setting(4)))
    assert (proof.most_parts_sent, proof.most_bytes_sent(100)) == (3, 300)


@pytest.mark.parametrize("num_workers", ANY_NUMBER)
def test_no_worker_is_a_leaf_in_both_trees_of_a_double_tree(num_workers: int) -> None:
    """A worker that is no leaf of a tree sends the sum down in it: everyone does so in one tree at least."""
    schedule = find("all_reduce", "double-tree").schedule(Setting(num_workers))
    forwards = {send.source for moves in schedule.rounds for send in moves.sends if not send.adds}
    assert forwards == (set(range(num_workers)) if num_workers > 1 else set())


def test_an_unknown_algorithm_is_answered_with_those_that_exist() -> None:
    with pytest.raises(BadArgument, match="no 'star' for broadcast: choose one of binomial, direct, scatter-gather"):
        find("broadcast", "star")


def test_a_broadcast_from_a_worker_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadArgument, match="source must be one of the workers 0 to 3, not 4"):
        find("broadcast", "binomial").schedule(Setting(4, source=4))


def test_two_trees_cannot_share_an_odd_number_of_chunks() -> None:
    with pytest.raises(BadArgument, match="an even number, half for each tree, not 3"):
        find("all_reduce", "double-tree").schedule(Setting(4, num_chunks=3))
