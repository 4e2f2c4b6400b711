"""What is said about grown batches, and what is refused."""

from typing import Any

import pytest
from noisy_data import Noisy, NoisyStream, sharded
from torch.utils.data import DataLoader

from lockstep.errors import BadArgument

AS_YOU_SET = "learning rate and schedule are as you set them (see lockstep.optim.scale_lr)"


def said_about(loader: Any, **told: Any) -> list[str]:
    said: list[str] = []
    sharded(loader, batch="grow", say=said.append, **told)
    return said


@pytest.mark.parametrize("dataset", [Noisy(4), NoisyStream(4)], ids=["with indices", "stream"])
def test_growing_says_both_numbers_and_that_nothing_else_changes(dataset: Any) -> None:
    assert said_about(DataLoader(dataset, 32), num_lanes=8) == [
        f'batch="grow": 32 samples for each of 8 lanes, 256 in a global batch; {AS_YOU_SET}'
    ]


def test_growing_for_one_lane_says_so() -> None:
    assert said_about(DataLoader(Noisy(4), 1), num_lanes=1) == [
        f'batch="grow": 1 sample for the only lane, 1 in a global batch; {AS_YOU_SET}'
    ]


def test_growing_over_an_own_batch_sampler_says_how_many_batches_are_taken_together() -> None:
    class Pairs:
        def __iter__(self) -> Any:
            return iter([[0, 1], [2, 3]])

    assert said_about(DataLoader(Noisy(4), batch_sampler=Pairs())) == [  # type: ignore[arg-type]
        f'batch="grow": 4 batches of Pairs in a global batch, cut evenly by samples between the lanes; {AS_YOU_SET}'
    ]


def test_nothing_is_said_about_batches_that_are_split() -> None:
    said: list[str] = []
    sharded(DataLoader(Noisy(4), 2), batch="split", say=said.append).rekey(0, 2)
    assert said == []


def test_a_resumed_run_with_other_lanes_says_its_own_numbers() -> None:
    said: list[str] = []
    loader = sharded(DataLoader(Noisy(4), 32), num_lanes=2, batch="grow", say=said.append)
    loader.rekey(0, 8)
    assert [text.split(";")[0] for text in said] == [
        'batch="grow": 32 samples for each of 2 lanes, 64 in a global batch',
        'batch="grow": 32 samples for each of 8 lanes, 256 in a global batch',
    ]


def test_a_resumed_run_with_the_same_lanes_says_it_once() -> None:
    said: list[str] = []
    sharded(DataLoader(Noisy(4), 2), batch="grow", say=said.append).rekey(7, 4)
    assert len(said) == 1


@pytest.mark.parametrize("batch", ["growing", "", None, True, 64, ["grow"]], ids=repr)
def test_another_rule_is_refused_with_the_two_that_there_are(batch: Any) -> None:
    with pytest.raises(BadArgument, match=r'batch="split" .* or batch="grow" .*, not batch='):
        sharded(DataLoader(Noisy(4), 2), batch=batch)


@pytest.mark.parametrize("dataset", [Noisy(4), NoisyStream(4)], ids=["with indices", "stream"])
def test_growing_items_that_are_whole_batches_is_refused(dataset: Any) -> None:
    with pytest.raises(
        BadArgument, match=r'batch_size=None .* Give the DataLoader a batch_size, or leave batch="grow"'
    ):
        sharded(DataLoader(dataset, None), batch="grow")
