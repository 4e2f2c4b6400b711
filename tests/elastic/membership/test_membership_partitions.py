"""Links are cut: between two groups, then one side goes on and the other leaves; or any links, then at most one does.

# Note [A newcomer of the dead]
# No worker arrives or joins while links are lost here. If those who went on admit one and then all die, only that
# newcomer knows of them; others who had not decided yet find all that they know dead, and go on. That takes somebody
# who decides later than all that, although it has nothing to wait for: a schedule can delay it so long, hosts do not.
"""

import random
from itertools import chain, combinations

import pytest
from histories import Aftermath, move_anyone, part, partitioned, settle_apart
from simulation import Simulation


def _far_sides(num_workers: int) -> list[frozenset[str]]:
    uids = [f"w{slot}" for slot in range(num_workers)]
    return [frozenset(far) for far in chain.from_iterable(combinations(uids, size) for size in range(1, num_workers))]


def _side_that_may_go_on(num_workers: int, far: frozenset[str]) -> bool:
    """True: the far one."""
    return len(far) * 2 > num_workers or (len(far) * 2 == num_workers and "w0" in far)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_exactly_one_side_goes_on_wherever_and_whenever_the_cut_falls(num_workers: int) -> None:
    for far in _far_sides(num_workers):
        for seed in range(12):
            chance, simulation = random.Random(seed), Simulation(num_workers)
            for _ in range(chance.randrange(200)):
                move_anyone(simulation, chance)
            parted = part(simulation, far, chance, 600)
            assert parted.went_on == {_side_that_may_go_on(num_workers, far)}, simulation.story()


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_those_who_may_not_go_on_leave_and_say_why(num_workers: int) -> None:
    for far in _far_sides(num_workers):
        simulation = Simulation(num_workers)
        part(simulation, far, random.Random(0), 800)
        out = [
            worker
            for uid, worker in simulation.workers.items()
            if (uid in far) != _side_that_may_go_on(num_workers, far)
        ]
        assert all("cannot be reached" in (worker.why_left or "") for worker in out), simulation.story()


@pytest.mark.parametrize("links", [[("w0", "w1")], [("w1", "w0")], [("w1", "w2"), ("w2", "w1")]], ids=str)
def test_of_three_of_whom_two_do_not_reach_each_other_two_go_on(links: list[tuple[str, str]]) -> None:
    for seed in range(20):
        chance, simulation = random.Random(seed), Simulation(3)
        for _ in range(chance.randrange(100)):
            move_anyone(simulation, chance)
        simulation.lose_links(links)
        settle_apart(simulation, chance)
        cut = {uid for link in links for uid in link}
        going_on = {worker.uid for worker in simulation.present}
        assert len(going_on) == 2, simulation.story()
        assert len(going_on & cut) == 1


def test_at_most_one_training_goes_on_in_any_partition() -> None:
    found = [partitioned(seed) for seed in range(80)]
    _all_kinds_were_there(found)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(10))
def test_at_most_one_training_goes_on_in_ten_thousand_partitions(block: int) -> None:
    found = [partitioned(seed) for seed in range(100_000 + block * 1000, 101_000 + block * 1000)]
    _all_kinds_were_there(found)


def _all_kinds_were_there(found: list[Aftermath]) -> None:
    """Somebody goes on in some, nobody in others; links are lost both ways, and one way; witnesses are asked."""
    assert {bool(aftermath.going_on) for aftermath in found} == {True, False}
    one_way = [any((to, source) not in one.links for source, to in one.links) for one in found if one.links]
    assert set(one_way) == {True, False}
    assert any(aftermath.simulation.witness for aftermath in found)
