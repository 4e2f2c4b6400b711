"""A worker is killed at each point of a step: the others end with the bits of a run that nothing happened to."""

from collections import Counter

import pytest
from disturbed import Plan, disturbed, undisturbed
from faults import Fault, sampled
from trainings import NUM_SAMPLES, STEPS_PER_EPOCH, Training

SHORT = Training()
CONVOLUTIONAL = Training(model="conv")

SURROUNDINGS = [
    f"{when} {what}" for what in ("begins", "computes", "waits", "prepares", "commits") for when in ("before", "after")
]
SENDS = [f"{when} send in {what} exchange" for what in ("record", "commit") for when in ("before", "after")]
EXCHANGES = ["after record exchange", *SENDS, "before reduce", "after reduce"]
SCRIPT = ["before update", "after update", "in loader"]
TWICE = ["before computes", "before send in record exchange", "before send in commit exchange", "after reduce"]
"""Points that come more than once in a step: in the second lane, between two messages, at the second bucket."""

POINTS = [(point, 1) for point in SURROUNDINGS + EXCHANGES + SCRIPT] + [(point, 2) for point in TWICE]


def test_the_undisturbed_run_reads_every_sample_once_in_every_epoch() -> None:
    _, steps, used = undisturbed(SHORT)
    for first in range(0, steps, STEPS_PER_EPOCH):
        epoch = range(first, first + STEPS_PER_EPOCH)
        counted = Counter(sample for step in epoch for samples in used[step].values() for sample in samples)
        assert counted == dict.fromkeys(range(NUM_SAMPLES), 1)


EVERY = [(worker, *point) for point in POINTS for worker in (0, 1, 2)]
"""Every worker at every point; the short version has every third point once, the workers in turn."""


@pytest.mark.parametrize(("worker", "point", "nth"), sampled(EVERY, 9, skip=1))
def test_a_kill_at_any_point_of_a_step_costs_nothing(worker: int, point: str, nth: int) -> None:
    result = disturbed(SHORT, 3, Plan((Fault(worker, 2, point, nth),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


@pytest.mark.parametrize("point", sampled(["before begins", "after computes", "after reduce", "after commits"], 2))
@pytest.mark.parametrize("step", [0, 1, 7])
def test_a_kill_in_the_first_the_second_or_the_last_step_costs_nothing(point: str, step: int) -> None:
    disturbed(SHORT, 3, Plan((Fault(0, step, point),)))


@pytest.mark.parametrize(
    "point", ["before begins", "after computes", "after reduce", "after prepares", "before update"]
)
def test_buffers_and_random_numbers_survive_a_kill(point: str) -> None:
    disturbed(CONVOLUTIONAL, 3, Plan((Fault(1, 2, point),)))


@pytest.mark.parametrize("wire", ["gloo", "hierarchical"])
@pytest.mark.parametrize(
    ("worker", "point", "nth"),
    [
        (0, "before computes", 1),
        (0, "before send in commit exchange", 2),
        (1, "before reduce", 1),
        (1, "before send in record exchange", 2),
        (2, "after reduce", 1),
        (2, "after commits", 1),
    ],
)
def test_a_kill_costs_nothing_on_any_wire(wire: str, worker: int, point: str, nth: int) -> None:
    disturbed(Training(options=(("wire", wire),)), 3, Plan((Fault(worker, 2, point, nth),)))


@pytest.mark.parametrize("points", [("before waits", "before waits"), ("after prepares", "before computes")])
@pytest.mark.parametrize("workers", [(0, 1), (1, 2), (0, 2)])
def test_two_killed_in_one_step_cost_nothing(workers: tuple[int, int], points: tuple[str, str]) -> None:
    faults = tuple(Fault(worker, 2, point) for worker, point in zip(workers, points, strict=True))
    result = disturbed(SHORT, 3, Plan(faults))
    assert [sizes[-1] for sizes in result.values("sizes")] == [1]


@pytest.mark.parametrize("survivor", [0, 2, 4])
def test_one_of_five_goes_on_alone(survivor: int) -> None:
    faults = tuple(Fault(worker, 2, "after reduce") for worker in range(5) if worker != survivor)
    result = disturbed(SHORT, 5, Plan(faults))
    assert [sizes[-1] for sizes in result.values("sizes")] == [1]


def test_one_by_one_all_but_the_last_are_lost() -> None:
    result = disturbed(SHORT, 4, Plan(tuple(Fault(worker, 1 + worker, "before waits") for worker in range(3))))
    assert result.values("sizes") == [[4, 4, 3, 2, 1, 1, 1, 1]]
