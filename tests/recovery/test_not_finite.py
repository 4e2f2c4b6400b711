"""A gradient that is not finite in one lane: every worker does the same, on any number of workers."""

import re
from dataclasses import replace

import pytest
from disturbed import Plan, disturbed, observed, undisturbed
from faults import Fault
from trainings import Training

STEP, LANE = 1, 5
CARRIERS = {1: 0, 2: 1, 3: 2}
"""Which of so many workers carries the lane."""


def _poisoned(policy: str, model: str = "conv") -> Training:
    training = Training(model=model)
    _, _, used = undisturbed(training)
    return replace(training, poison=(STEP, used[STEP][LANE][0]), options=(("not_finite", policy),))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_step_that_is_skipped_leaves_the_state_untouched_on_every_worker(num_workers: int) -> None:
    result = disturbed(_poisoned("skip"), num_workers, Plan())
    for digests in result.values("digests"):
        assert digests[STEP] == digests[STEP + 1]
        assert len(set(digests)) == len(digests) - 1


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_sentence_names_lane_worker_parameter_and_samples(num_workers: int) -> None:
    result = disturbed(_poisoned("skip"), num_workers, Plan())
    (sentence,) = {text for said in result.values("said") for text in said if not text.startswith("BatchNorm sees")}
    assert f"step {STEP}: gradient of lane {LANE} (worker {CARRIERS[num_workers]}) is not finite" in sentence
    assert re.search(r"first in \w+\.\w+ \(nan, \d+ elements?\), samples \d+-\d+ of the batch", sentence)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_run_that_shall_stop_stops_on_every_worker(num_workers: int) -> None:
    result = observed(_poisoned("stop"), num_workers, Plan())
    assert [outcome.error for outcome in result.outcomes] == ["NotFinite"] * num_workers
    assert len({outcome.message for outcome in result.outcomes}) == 1


def test_a_kill_in_a_step_that_is_skipped_costs_nothing() -> None:
    disturbed(_poisoned("skip"), 3, Plan((Fault(1, STEP, "after computes"),)))


def test_a_kill_when_a_step_that_is_skipped_is_held_everywhere_costs_nothing() -> None:
    disturbed(_poisoned("skip"), 3, Plan((Fault(1, STEP, "after prepares"),)))
