"""Why a run differs after something has happened to it, on traces made by hand: one for each cause."""

from dataclasses import replace

import pytest
from synthetic import PARAMETERS, make_run, with_lane, with_state

from lockstep.verify.cause import DifferenceCause, LikelyCause, explain_sum
from lockstep.verify.evidence import RunTrace, WorkerTrace, difference_after
from lockstep.verify.fault_cause import AppliedFault, judge_fault

FAULT = AppliedFault(step=2, slot=1)
RESUME = AppliedFault(step=2)
CALM = make_run(2, num_steps=6)
OTHER = {name: (f"other {name}", 1.5) for name in PARAMETERS}


def verdict(disturbed: RunTrace, happened: AppliedFault) -> LikelyCause:
    found = difference_after(CALM, disturbed)
    assert found is not None
    return judge_fault(found, happened)


def differing_after(step: int, *changed: str) -> RunTrace:
    return with_state(CALM, step, *(changed or PARAMETERS))


def part(run: RunTrace, first: int, last: int) -> WorkerTrace:
    """The first worker of the run, as if it had been there from step `first` to step `last` only."""
    states = {step: state for step, state in run.workers[0].states.items() if first <= step <= last}
    return WorkerTrace(states, states[last])


def test_a_gradient_that_differs_once_lanes_have_moved_means_state_carried_by_hand() -> None:
    said = verdict(with_lane(differing_after(3), 2, 3, gradients=OTHER, worker=0), FAULT)
    assert said.cause is DifferenceCause.CARRIED
    assert "lane 3 (worker 1 in the calm run, worker 0 here)" in said.explanation
    assert "run.carried" in said.explanation


def test_a_lane_that_has_moved_is_named_before_one_that_has_not() -> None:
    moved = with_lane(with_lane(differing_after(3), 2, 0, gradients=OTHER), 2, 3, gradients=OTHER, worker=0)
    assert "lane 3" in verdict(moved, FAULT).explanation


def test_a_gradient_that_differs_only_once_the_new_worker_computes_means_untracked_state() -> None:
    said = verdict(with_lane(differing_after(6), 5, 3, gradients=OTHER), FAULT)
    assert said.cause is DifferenceCause.UNTRACKED
    assert "run.replicate(model, optimizer, name=object)" in said.explanation


@pytest.mark.parametrize(("may_move", "cause"), [(True, DifferenceCause.UNTRACKED), (False, DifferenceCause.CARRIED)])
def test_after_a_resume_a_gradient_is_judged_by_whether_lanes_may_move(may_move: bool, cause: DifferenceCause) -> None:
    disturbed = with_lane(differing_after(3), 2, 0, gradients=OTHER)
    assert verdict(disturbed, replace(RESUME, may_move=may_move)).cause is cause


def test_other_data_mean_an_order_that_is_not_found_again() -> None:
    said = verdict(with_lane(differing_after(3), 2, 1, data="other"), RESUME)
    assert said.cause is DifferenceCause.DATA
    assert "lane 1" in said.explanation


def test_other_threads_and_generators_are_told_as_without_a_fault() -> None:
    assert verdict(with_lane(differing_after(3), 2, 1, threads=2), FAULT).cause is DifferenceCause.THREADS
    assert (
        verdict(with_lane(differing_after(3), 2, 1, chance={"torch": "other"}), FAULT).cause is DifferenceCause.RANDOM
    )
    assert verdict(differing_after(3, "mean"), FAULT).cause is DifferenceCause.BUFFER


def test_a_rate_that_differs_is_named_with_both_values() -> None:
    def rated(run: RunTrace, *rates: float) -> RunTrace:
        states = dict(run.workers[0].states)
        for step, rate in enumerate(rates):
            states[step] = replace(states[step], rates={"optimizer, group 0": rate})
        return replace(run, workers=(WorkerTrace(states, run.workers[0].last),))

    found = difference_after(rated(CALM, 0.4, 0.3, 0.2, 0.1), rated(differing_after(3), 0.4, 0.3, 0.2, 0.4))
    assert found is not None
    said = judge_fault(found, RESUME)
    assert said.cause is DifferenceCause.UNTRACKED
    assert "the learning rate of optimizer, group 0 is 0.4 and was 0.1" in said.explanation


def test_an_update_that_differs_alone_means_untracked_state() -> None:
    said = verdict(differing_after(4), FAULT)
    assert said.cause is DifferenceCause.UNTRACKED
    assert "average of weights" in said.explanation


@pytest.mark.parametrize("num_steps", [4, 8])
def test_another_number_of_steps_means_a_count_of_the_scripts_own(num_steps: int) -> None:
    said = verdict(make_run(2, num_steps), RESUME)
    assert said.cause is DifferenceCause.COUNT
    assert f"ended after {num_steps} steps, the calm run after 6" in said.explanation


@pytest.mark.parametrize("happened", [FAULT, RESUME])
def test_a_difference_before_the_fault_means_random_numbers(happened: AppliedFault) -> None:
    said = verdict(differing_after(1), happened)
    assert said.cause is DifferenceCause.RANDOM
    assert "before anything had happened" in said.explanation


def test_a_state_that_differs_where_the_run_was_resumed_was_set_by_the_script() -> None:
    stopped, resumed = part(CALM, 0, 2), part(differing_after(2), 2, 6)
    said = verdict(replace(CALM, workers=(stopped, resumed)), RESUME)
    assert said.cause is DifferenceCause.UNTRACKED
    assert "before its first step" in said.explanation


def with_norms(run: RunTrace, *norms: float) -> RunTrace:
    return replace(run, norms={0: {f"parameter {number}": norm for number, norm in enumerate(norms)}})


@pytest.mark.parametrize(("norms", "is_sum"), [((12.0, 16.0), True), ((10.5, 14.0), True), ((3.0, 4.0), False)])
def test_a_first_gradient_larger_by_the_number_of_lanes_means_a_sum(norms: tuple[float, float], is_sum: bool) -> None:
    result = explain_sum(with_norms(make_run(1), 3.0, 4.0), with_norms(make_run(1), *norms))
    assert ('run.backward(loss, reduction="sum")' in result) is is_sum


def test_traces_without_gradients_say_nothing_of_sums() -> None:
    assert explain_sum(make_run(1), make_run(1)) == ""
