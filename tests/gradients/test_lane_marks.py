"""Marks of lanes: who has computed a lane otherwise than it was computed before."""

import pytest
import torch

from lockstep.gradients.marks import KnownLanes, LaneMarks
from lockstep.lanes import Assignment

NOW = Assignment.explicit([[0, 1], [2], [3]])
BEFORE = NOW.without([2])
KNOWN = KnownLanes((10.0, 11.0, 12.0, 13.0), BEFORE, frozenset({2}))


def test_without_newcomers_the_others_carry_what_they_carry_and_the_rest() -> None:
    assert BEFORE.lanes_of == ((0, 1), (2, 3), ())


def test_a_newcomer_that_gets_what_the_others_got_stays() -> None:
    assert KNOWN.computed_otherwise((10.0, 11.0, 12.0, 13.0), NOW) == {}


def test_a_newcomer_that_gets_another_mark_is_named_with_the_lane() -> None:
    assert KNOWN.computed_otherwise((10.0, 11.0, 12.0, 99.0), NOW) == {2: 3}
    assert KNOWN.computed_otherwise((10.0, 11.0, 12.0, None), NOW) == {2: 3}


def test_lanes_that_their_own_worker_computes_otherwise_show_nothing() -> None:
    """Then they are not reproducible: it is not the newcomer that differs."""
    assert KNOWN.computed_otherwise((10.0, 77.0, 12.0, 99.0), NOW) == {}


def test_a_lane_that_has_only_moved_between_others_accuses_no_newcomer() -> None:
    now = Assignment.explicit([[0, 1, 2], [], [3]])
    assert KNOWN.computed_otherwise((10.0, 11.0, 99.0, 13.0), now) == {}


@pytest.mark.parametrize("others", [[], [0, 1]])
def test_the_mark_of_a_lane_is_of_all_its_gradients_in_any_order(others: list[int]) -> None:
    gradients = {"weight": torch.randn(4, 3), "bias": torch.randn(4)}
    whole, parts = LaneMarks(), LaneMarks()
    for lane in [*others, 2]:
        whole.look(lane, gradients)
    for name in ("bias", "weight"):
        parts.look(2, {name: gradients[name]})
    assert whole.of_lanes(3)[2] == parts.of_lanes(3)[2] is not None
    assert parts.of_lanes(3)[:2] == [None, None]


def test_a_flipped_sign_is_another_mark() -> None:
    one, other = LaneMarks(), LaneMarks()
    one.look(0, {"weight": torch.ones(5)})
    other.look(0, {"weight": -torch.ones(5)})
    assert one.of_lanes(1) != other.of_lanes(1)
