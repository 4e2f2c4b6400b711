"""Which runs a verification makes."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lockstep.programs.verification.runs import Request
from lockstep.programs.verification.verify import interleaved, only_parameters, variants


def request(*counts: int, lanes: int = 8) -> Request:
    return Request("train.py", Path("runs"), counts, lanes=lanes, steps=5)


def test_every_count_is_run_and_the_largest_also_with_interleaved_lanes() -> None:
    assert [variant.name for variant in variants(request(1, 3, 2))] == ["1", "3", "2", "3-interleaved"]


def test_interleaving_that_changes_nothing_is_not_run() -> None:
    assert [variant.name for variant in variants(request(1, 4, lanes=4))] == ["1", "4"]


def test_only_the_first_run_leaves_its_parameters_for_the_distance() -> None:
    assert [variant.dump for variant in variants(request(2, 4))] == [True, False, False]


@given(lanes=st.integers(1, 40), workers=st.integers(1, 9))
def test_interleaved_lanes_are_an_assignment_in_which_neighbours_never_meet(lanes: int, workers: int) -> None:
    carriers = interleaved(lanes, workers).carriers()
    assert len(carriers) == lanes
    assert all(carriers[lane] != carriers[lane + 1] for lane in range(lanes - 1) if workers > 1)


def test_all_variants_share_lanes_and_steps() -> None:
    for variant in variants(request(1, 2, 3, 9)):
        assert variant.assignment.num_lanes == 8
        assert variant.steps == 5


def test_the_distance_leaves_out_buffers_and_optimizer_state_but_no_parameter_of_similar_name() -> None:
    names = ("w", "mean", "optimizer/w/exp_avg", "optimizer2/w/step", "optimizer_head.weight", "model/w")
    distances = only_parameters(dict.fromkeys(names, 0.5), frozenset({"mean"}))
    assert list(distances) == ["w", "optimizer_head.weight", "model/w"]
