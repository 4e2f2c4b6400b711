"""Why runs differ, on traces made by hand: one for each cause."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from synthetic import PARAMETERS, make_run, with_lane, with_state

from lockstep.events import KEPT_BY_DATA, KEPT_BY_LANE
from lockstep.verify.cause import DifferenceCause, LikelyCause, judge
from lockstep.verify.evidence import RunTrace, first_difference

WARNING = "put_ does not have a deterministic implementation, but you set 'torch.use_deterministic...'"
ONE, TWO = make_run(1), with_state(make_run(2), 2, "weight")
"""They differ after two steps; the lanes that led there are those of step 1."""


def verdict(left: RunTrace, right: RunTrace, again: RunTrace | None = None) -> LikelyCause:
    """The verdict on two runs; `again` is what a second run of the left one gives, the same unless told."""
    found = first_difference([left, right])
    assert found is not None
    return judge(found, lambda: found.left.run if again is None else again)


def unneeded() -> RunTrace:
    raise AssertionError("a second run was made that was not needed")


def gradients(norm: float) -> dict[str, tuple[str, float]]:
    return {name: (f"other {name}", norm) for name in PARAMETERS}


def test_other_threads_are_named_with_lane_and_workers() -> None:
    said = verdict(ONE, with_lane(TWO, 1, 3, threads=2, gradients=gradients(1.0)))
    assert said.cause is DifferenceCause.THREADS
    assert "lane 3 (worker 0 with 1 worker, worker 1 with 2 workers) with 1 and 2 threads" in said.explanation


def test_other_data_are_random_numbers_if_a_second_run_differs() -> None:
    said = verdict(ONE, with_lane(TWO, 1, 2, data="other"), again=with_state(ONE, 2, "weight"))
    assert said.cause is DifferenceCause.RANDOM
    assert "The data of lane 2" in said.explanation


def test_other_data_depend_on_the_rank_if_a_second_run_is_the_same() -> None:
    assert verdict(ONE, with_lane(TWO, 1, 2, data="other")).cause is DifferenceCause.RANK


def test_what_a_data_set_keeps_for_the_next_sample_is_named() -> None:
    right = replace(with_lane(TWO, 1, 2, data="other"), kept=(f"{KEPT_BY_LANE} n", f"{KEPT_BY_DATA}: m"))
    said = verdict(ONE, right)
    assert said.cause is DifferenceCause.SAMPLES
    assert said.explanation.endswith(f"differ, and a note says: {KEPT_BY_DATA}: m")


def test_a_generator_that_stands_elsewhere_at_the_end_of_a_lane_means_random_numbers() -> None:
    chance = {"torch": "torch 1 0", "NumPy": "other"}
    said = verdict(ONE, with_lane(TWO, 1, 0, chance=chance, gradients=gradients(1.0)))
    assert said.cause is DifferenceCause.RANDOM
    assert "NumPy's generator" in said.explanation


def test_a_generator_that_only_one_side_uses_is_no_evidence() -> None:
    chance = {"torch": "torch 1 0", "CUDA": "only here"}
    assert verdict(ONE, with_lane(TWO, 1, 0, chance=chance)).cause is DifferenceCause.RANK


@pytest.mark.parametrize(
    ("norm", "reproducible", "warned", "cause"),
    [
        (5.0, True, False, DifferenceCause.RANK),
        (5.0, True, True, DifferenceCause.RANK),
        (5.0, False, False, DifferenceCause.RANDOM),
        (5.0, False, True, DifferenceCause.OPERATOR),
        (1.0 + 1e-6, True, False, DifferenceCause.RANK),
        (1.0 + 1e-6, True, True, DifferenceCause.OPERATOR),
        (1.0 + 1e-6, False, False, DifferenceCause.OPERATOR),
        (1.0 + 1e-6, False, True, DifferenceCause.OPERATOR),
    ],
)
def test_a_gradient_is_judged_by_size_by_a_second_run_and_by_warnings(
    norm: float, reproducible: bool, warned: bool, cause: DifferenceCause
) -> None:
    right = replace(with_lane(TWO, 1, 3, gradients=gradients(norm)), warnings=(WARNING,) * warned)
    said = verdict(ONE, right, again=ONE if reproducible else with_state(ONE, 1, "bias"))
    assert said.cause is cause
    assert "The gradient of weight differs in lane 3" in said.explanation
    assert ("torch warned: put_ does not have a deterministic implementation." in said.explanation) == (
        warned and cause is DifferenceCause.OPERATOR
    )


def test_what_a_lane_keeps_for_the_next_one_is_named_if_the_bits_come_again() -> None:
    right = replace(with_lane(TWO, 1, 3, gradients=gradients(5.0)), kept=(f"{KEPT_BY_LANE} n",))
    said = verdict(ONE, right, again=ONE)
    assert said.cause is DifferenceCause.KEPT
    assert f"A second run with 1 worker gave the same bits again, and a note says: {KEPT_BY_LANE} n" in said.explanation
    assert verdict(ONE, right, again=with_state(ONE, 1, "bias")).cause is DifferenceCause.RANDOM
    near = replace(with_lane(TWO, 1, 3, gradients=gradients(1.0 + 1e-6)), kept=(f"{KEPT_BY_LANE} n",))
    assert verdict(ONE, near, again=ONE).cause is DifferenceCause.RANK


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_gradient_that_differs_by_rounding_in_a_compiled_model_is_the_compilers(reproducible: bool) -> None:
    right = replace(with_lane(TWO, 1, 3, gradients=gradients(1.0 + 1e-6)), compiled=("7 operators · dynamic shapes",))
    said = verdict(ONE, right, again=ONE if reproducible else with_state(ONE, 1, "bias"))
    assert said.cause is DifferenceCause.COMPILER
    assert "part of the model is compiled (7 operators · dynamic shapes)" in said.explanation
    far = replace(with_lane(TWO, 1, 3, gradients=gradients(5.0)), compiled=("7 operators",))
    assert verdict(ONE, far).cause is DifferenceCause.RANK


def test_a_gradient_that_is_nan_on_one_side_is_more_than_rounding() -> None:
    right = with_lane(TWO, 1, 3, gradients=gradients(float("nan")))
    assert verdict(ONE, right, again=with_state(ONE, 1, "bias")).cause is DifferenceCause.RANDOM


def test_lanes_of_other_steps_are_no_evidence() -> None:
    said = verdict(ONE, with_lane(TWO, 2, 0, data="other"))
    assert "every lane had the same data and gradients" in said.explanation


def test_a_buffer_that_differs_alone_is_named() -> None:
    said = verdict(ONE, with_state(make_run(2), 1, "mean", worker=1))
    assert said.cause is DifferenceCause.BUFFER
    assert "Buffer mean differs between 2 workers and worker 1 of 2 workers" in said.explanation


def test_a_buffer_that_differs_with_a_parameter_is_not_the_cause() -> None:
    assert verdict(ONE, with_state(make_run(2), 1, "mean", "weight")).cause is DifferenceCause.RANK


def test_replicas_that_part_the_same_way_twice_mean_code_that_depends_on_the_rank() -> None:
    said = verdict(ONE, with_state(make_run(3), 1, "bias", worker=2))
    assert said.cause is DifferenceCause.RANK
    assert "Worker 0 and worker 2 of 3 workers hold other values of bias" in said.explanation


def test_replicas_that_part_another_way_the_second_time_mean_random_numbers() -> None:
    said = verdict(ONE, with_state(make_run(2), 1, "bias", worker=1), again=make_run(2))
    assert said.cause is DifferenceCause.RANDOM


def test_a_model_made_of_unset_random_numbers_is_told_to_be_made_after_the_start() -> None:
    said = verdict(ONE, with_state(make_run(2), 0, "weight"), again=with_state(ONE, 0, "weight"))
    assert said.cause is DifferenceCause.RANDOM
    assert "before the first step" in said.explanation
    assert "after lockstep.start()" in said.explanation


def test_a_model_that_depends_on_the_number_of_workers_is_code_that_depends_on_the_rank() -> None:
    assert verdict(ONE, with_state(make_run(2), 0, "weight")).cause is DifferenceCause.RANK


def test_an_update_that_differs_after_equal_lanes_depends_on_the_rank() -> None:
    assert verdict(ONE, TWO).cause is DifferenceCause.RANK


def test_an_update_that_differs_after_equal_lanes_and_from_run_to_run_means_random_numbers() -> None:
    assert verdict(ONE, TWO, again=with_state(ONE, 2, "bias")).cause is DifferenceCause.RANDOM


def test_other_numbers_of_steps_are_told() -> None:
    said = verdict(ONE, make_run(2, num_steps=1))
    assert said.cause is DifferenceCause.RANK
    assert "1 worker made 3 steps, 2 workers made 1" in said.explanation


@pytest.mark.parametrize(
    "right",
    [
        lambda: with_lane(TWO, 1, 0, threads=2),
        lambda: with_lane(TWO, 1, 0, chance={"torch": "other"}),
        lambda: with_state(make_run(2), 1, "mean"),
    ],
    ids=["threads", "chance", "buffer"],
)
def test_what_tells_itself_needs_no_second_run(right: Callable[[], RunTrace]) -> None:
    found = first_difference([ONE, right()])
    assert found is not None
    judge(found, unneeded)
