"""The link between two groups is cut, and nobody is dead: one side goes on, the other leaves."""

import random
from itertools import chain, combinations

import pytest
from histories import move_anyone, part
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
