"""Generators outside of lanes stand where the script goes on as they stood there."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep.chance import Generators
from lockstep.data import ShardedLoader
from lockstep.script.places import Places
from lockstep.script.restart.restored_generators import RestoredGenerators
from lockstep.state.models import Models
from lockstep.state.progress import DataProgress


def seeded(key: int) -> Generators:
    torch.manual_seed(key)
    random.seed(key)
    return Generators.now()


def is_at(key: int) -> bool:
    """Whether the generators stand as they were seeded."""
    now = Generators.now()
    return now.equal_on_cpu(seeded(key))


def loaded(head: Generators | None) -> RestoredGenerators:
    """Those of a snapshot that was taken at 7; afterwards the script has seeded by itself."""
    restored = RestoredGenerators()
    seeded(7)
    restored.loaded(head)
    seeded(1)
    return restored


def test_in_an_epoch_they_are_those_of_its_head_and_where_the_pass_goes_on_those_of_the_snapshot() -> None:
    restored = loaded(seeded(5))
    restored.epoch_begins()
    assert is_at(5)
    seeded(2)
    restored.asked(in_pass=True, is_trained_on=True)
    assert is_at(7)
    seeded(2)
    restored.asked(in_pass=True, is_trained_on=True)
    assert is_at(2)


def test_the_head_is_that_of_the_epoch_also_when_the_run_is_saved_again() -> None:
    head = seeded(5)
    restored = loaded(head)
    assert restored.head is head
    restored.epoch_begins()
    assert restored.head is not None
    assert restored.head.equal_on_cpu(head)


def test_between_two_epochs_they_are_those_of_the_snapshot_and_the_head_draws_for_the_first_time() -> None:
    restored = loaded(None)
    restored.epoch_begins()
    assert is_at(7)
    seeded(2)
    for in_pass in (False, True):  # a pass that outlasts its epoch goes on in the middle
        restored.asked(in_pass=in_pass, is_trained_on=True)
        assert is_at(2)


def test_the_next_epoch_draws_on() -> None:
    restored = loaded(seeded(5))
    restored.epoch_begins()
    seeded(2)
    restored.epoch_begins()
    assert is_at(2)
    restored.asked(in_pass=True, is_trained_on=True)
    assert is_at(2)


@pytest.mark.parametrize("in_pass", [True, False])
def test_without_epochs_they_are_those_of_the_snapshot_in_the_middle_of_a_pass(in_pass: bool) -> None:
    restored = loaded(None)
    restored.asked(in_pass=in_pass, is_trained_on=True)
    assert is_at(7 if in_pass else 1)


def test_a_loader_that_is_only_evaluated_on_does_not_show_where_the_script_goes_on() -> None:
    restored = loaded(seeded(5))
    restored.epoch_begins()
    restored.asked(in_pass=False, is_trained_on=False)
    assert is_at(5)


def test_what_stands_at_the_head_is_done_again_until_the_pass_goes_on() -> None:
    restored = loaded(seeded(5))
    assert not restored.is_done_again  # the script is before its epochs
    restored.epoch_begins()
    assert restored.is_done_again
    restored.asked(in_pass=True, is_trained_on=True)
    assert not restored.is_done_again


def test_between_two_epochs_nothing_is_done_again() -> None:
    restored = loaded(None)
    restored.epoch_begins()
    assert not restored.is_done_again


def test_a_step_ends_what_is_put_back() -> None:
    restored = loaded(seeded(5))
    restored.epoch_begins()
    restored.step_begins()
    restored.asked(in_pass=True, is_trained_on=True)
    assert is_at(5)


def test_without_a_snapshot_nothing_is_put_back() -> None:
    restored = RestoredGenerators()
    seeded(3)
    restored.epoch_begins()
    restored.asked(in_pass=True, is_trained_on=True)
    assert is_at(3)
    assert restored.head is not None
    assert restored.head.equal_on_cpu(seeded(3))


def following() -> tuple[Places, DataProgress, ShardedLoader]:
    """A script with one loader, which is asked for its first batch at 3."""
    progress = DataProgress()
    data = DataLoader(TensorDataset(torch.arange(20.0)), 4)
    places = Places(Models(), progress)
    loader = progress.add(
        lambda number: ShardedLoader(data, seed=0, num_lanes=2, lanes=lambda: (0, 1), index=number, say=print)
    )
    return places, progress, loader


def test_a_batch_that_is_handed_out_again_is_asked_for_with_the_generators_of_before() -> None:
    places, progress, loader = following()
    batches = iter(loader)
    for key in (3, 5):
        asked = seeded(key)
        places.asked(0)
        batch = next(batches)
        seeded(9)
        assert places.generators().equal_on_cpu(asked)
        places.committed(batch)
        seeded(9)
        now = seeded(9)
    assert places.generators().equal_on_cpu(now)
    assert progress.has_committed


def test_a_pass_that_had_no_batch_left_when_it_was_asked_is_none_that_goes_on() -> None:
    places, _, loader = following()
    for batch in loader:
        places.committed(batch)
    seeded(3)
    places.asked(0)  # for the end
    batches, asked = iter(loader), seeded(5)
    places.asked(0)
    next(batches)
    seeded(9)
    assert places.generators().equal_on_cpu(asked)


def test_of_a_loader_that_goes_on_behind_what_it_has_handed_out_nothing_comes_again() -> None:
    places, progress, loader = following()
    batches = iter(loader)
    places.asked(0)
    progress.evaluates(next(batches))
    now = seeded(9)
    assert places.generators().equal_on_cpu(now)


def test_where_no_epoch_is_left_they_are_those_of_the_snapshot_behind_the_epochs() -> None:
    restored = loaded(None)
    restored.epochs_are_over()
    assert is_at(7)
    assert not restored.is_before


def test_behind_epochs_that_were_had_they_go_on() -> None:
    restored = loaded(None)
    restored.epoch_begins()
    seeded(2)
    restored.epochs_are_over()
    assert is_at(2)


def drawing(*, between: bool, has_epochs: bool) -> RestoredGenerators:
    """As in a snapshot of a script that draws between batches, or does not; it is on its way to its batch."""
    before = RestoredGenerators()
    for _ in range(2):
        before.at_lanes(Generators.now(), is_own_batch=False)
        if between:
            random.random()
        before.before_batch()
    restored = loaded(seeded(5) if has_epochs else None)
    restored.draws_between = before.draws_between
    if has_epochs:
        restored.epoch_begins()
    else:
        seeded(7)
    return restored


@pytest.mark.parametrize("has_epochs", [True, False])
@pytest.mark.parametrize("between", [True, False])
def test_what_is_drawn_on_the_way_to_a_batch_counts_where_the_script_draws_between_batches(
    between: bool, has_epochs: bool
) -> None:
    restored = drawing(between=between, has_epochs=has_epochs)
    assert not restored.has_drawn_ahead
    random.random()
    assert restored.has_drawn_ahead is between
    restored.step_begins()
    assert not restored.has_drawn_ahead


def test_a_script_with_batches_of_its_own_draws_between_if_its_generators_move_from_lanes_to_lanes() -> None:
    followed = RestoredGenerators()
    for _ in range(2):
        followed.at_lanes(Generators.now(), is_own_batch=True)
    random.random()
    followed.epoch_begins()
    followed.at_lanes(Generators.now(), is_own_batch=True)
    assert not followed.draws_between
    random.random()
    followed.at_lanes(Generators.now(), is_own_batch=True)
    assert followed.draws_between


def test_who_loads_numpy_has_drawn_nothing() -> None:
    now = Generators.now()
    without = replace(now, numpy=None)
    assert not now.has_moved_since(without)
    assert not without.has_moved_since(now)
    np.random.rand()
    assert Generators.now().has_moved_since(now)
