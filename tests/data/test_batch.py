"""A global batch as one worker holds it."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data import GlobalBatch, Position
from lockstep.errors import CannotCut, Misuse
from lockstep.lanes import Assignment


@given(size=st.integers(0, 50), num_lanes=st.integers(1, 10), num_workers=st.integers(1, 12))
def test_over_any_workers_every_sample_is_in_exactly_one_share(size: int, num_lanes: int, num_workers: int) -> None:
    whole = torch.arange(size)
    shares: dict[int, Any] = {}
    for lanes in Assignment.even(num_lanes, num_workers).lanes_of:
        shares |= GlobalBatch.cut(whole, num_lanes, lanes).shares
    assert [int(x) for lane in sorted(shares) for x in shares[lane]] == whole.tolist()


def test_its_length_is_that_of_the_whole_batch_also_where_no_lane_is_carried() -> None:
    assert len(GlobalBatch.cut(torch.ones(7), 4, lanes=())) == 7


def test_lanes_without_samples_are_absent() -> None:
    assert sorted(GlobalBatch.cut(torch.ones(2), 4, lanes=range(4)).shares) == [1, 3]


def test_a_batch_cut_from_a_whole_one_has_no_position() -> None:
    assert GlobalBatch.cut(torch.ones(2), 1, lanes=[0]).position is None


def test_a_batch_that_cannot_be_cut_is_refused_also_where_no_lane_is_carried() -> None:
    with pytest.raises(CannotCut):
        GlobalBatch.cut((torch.ones(2), torch.ones(3)), 1, lanes=())


@pytest.mark.parametrize("use", [list, lambda batch: batch[0]], ids=["iterating", "indexing"])
def test_using_it_as_data_says_what_to_write_instead(use: Any) -> None:
    with pytest.raises(Misuse, match=r"write `for x, y in run\.lanes\(batch\): \.\.\.`"):
        use(GlobalBatch.cut(torch.ones(2), 1, lanes=[0]))


def test_it_cannot_be_changed() -> None:
    batch = GlobalBatch.cut(torch.ones(2), 1, lanes=[0])
    with pytest.raises(FrozenInstanceError):
        batch.num_samples = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        batch.shares[1] = 0  # type: ignore[index]


def test_positions_are_ordered_by_epoch_then_step() -> None:
    assert Position(0, 9) < Position(1, 0) < Position(1, 1)
