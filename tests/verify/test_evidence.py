"""Where runs first part, on traces made by hand."""

from hypothesis import given
from hypothesis import strategies as st
from synthetic import NUM_STEPS, OPTIMIZER, PARAMETERS, make_run, state, with_state

from lockstep.verify.evidence import (
    RunTrace,
    TracedState,
    WorkerTrace,
    difference_after,
    first_difference,
    is_equal,
)


def test_equal_runs_have_no_difference() -> None:
    assert first_difference([make_run(1), make_run(2), make_run(4)]) is None


@given(step=st.integers(0, NUM_STEPS), workers=st.integers(2, 4))
def test_the_first_step_that_differs_is_named(step: int, workers: int) -> None:
    found = first_difference([make_run(1), make_run(3), with_state(make_run(workers), step, "bias")])
    assert found is not None
    assert (found.step, found.tensors, str(found.right)) == (step, ("bias",), f"{workers} workers")


def test_the_first_tensor_is_the_first_in_the_models_order() -> None:
    found = first_difference([make_run(1), with_state(make_run(2), 1, *OPTIMIZER, *reversed(PARAMETERS))])
    assert found is not None
    assert found.tensors == (*PARAMETERS, *OPTIMIZER)


def test_a_worker_that_parts_from_its_own_run_is_named() -> None:
    found = first_difference([make_run(1), with_state(make_run(3), 2, "weight", worker=2)])
    assert found is not None
    assert found.between_replicas
    assert (found.step, found.right.worker) == (2, 2)


def test_workers_of_one_run_are_named_before_different_runs_at_the_same_step() -> None:
    other = with_state(with_state(make_run(2), 1, "bias"), 1, "weight", worker=1)
    found = first_difference([make_run(1), other])
    assert found is not None
    assert found.between_replicas


def test_a_difference_between_runs_that_is_earlier_comes_first() -> None:
    parted = with_state(make_run(2), 3, "weight", worker=1)
    found = first_difference([make_run(1), parted, with_state(make_run(3), 2, "weight")])
    assert found is not None
    assert (found.step, found.between_replicas) == (2, False)


def test_a_run_that_ends_early_differs_where_it_is_missing() -> None:
    found = first_difference([make_run(1), make_run(2, num_steps=2)])
    assert found is not None
    assert (found.step, found.tensors) == (3, ())


def test_a_tensor_that_only_one_run_has_differs() -> None:
    less = TracedState("digest", {name: digest for name, digest in state(0).tensors.items() if name != "bias"})
    found = first_difference([make_run(1), RunTrace("2 workers", (WorkerTrace({0: less}, less),))])
    assert found is not None
    assert (found.step, found.tensors) == (0, ("bias",))


def test_a_run_whose_workers_differ_is_not_equal_to_itself() -> None:
    run = with_state(make_run(2), 1, "bias", worker=1)
    assert not is_equal(run, run)


def part(run: RunTrace, first: int, last: int) -> WorkerTrace:
    states = {step: state for step, state in run.workers[0].states.items() if first <= step <= last}
    return WorkerTrace(states, states[last])


def test_workers_that_were_there_for_a_part_of_a_disturbed_run_are_equal_to_a_calm_one() -> None:
    calm = make_run(2)
    disturbed = RunTrace("disturbed", (part(calm, 0, 1), part(calm, 1, NUM_STEPS)))
    assert difference_after(calm, disturbed) is None


def test_a_late_worker_of_a_disturbed_run_that_differs_is_named() -> None:
    calm = make_run(2)
    disturbed = RunTrace("disturbed", (part(calm, 0, 3), part(with_state(calm, 2, "bias"), 1, 3)))
    found = difference_after(calm, disturbed)
    assert found is not None
    assert (found.step, found.tensors, found.right.worker) == (2, ("bias",), 1)


def test_a_disturbed_run_in_which_nobody_came_to_the_end_differs_there() -> None:
    found = difference_after(make_run(2), RunTrace("disturbed", (part(make_run(2), 0, 2),)))
    assert found is not None
    assert (found.step, found.tensors) == (NUM_STEPS, ())
