"""What the other tests here rely on: the ledger tells a step that was computed again from one that counts twice."""

import pytest
from ledger import Ledger

FIRST = [["lane", 0, 100, 1, 3, 0, [7, 8]], ["lane", 1, 101, 1, 3, 1, [9]], ["counts", 0, 100, 1, 3]]
AGAIN = [["lane", 1, 101, 2, 3, 0, [7, 8]], ["lane", 1, 101, 2, 3, 1, [9]], ["counts", 1, 101, 2, 3]]


def test_a_step_counts_as_computed_again_by_those_who_are_left() -> None:
    assert Ledger([*FIRST, *AGAIN]).used() == {3: {0: [7, 8], 1: [9]}}


def test_a_worker_that_counted_a_step_and_goes_on_must_not_see_it_again() -> None:
    with pytest.raises(AssertionError, match="step 3 counts twice"):
        Ledger([*FIRST, *AGAIN, ["lane", 0, 100, 2, 4, 0, [5]]]).used()


def test_a_lane_that_two_workers_gave_is_found() -> None:
    with pytest.raises(AssertionError, match=r"lane 1 of step 3 was used by workers \[0, 1\]"):
        Ledger([*FIRST, ["lane", 0, 100, 1, 3, 1, [9]]]).used()
