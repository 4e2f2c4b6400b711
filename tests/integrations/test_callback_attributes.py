"""What travels of the attributes of callbacks. No trainer is needed: with trainers they are in the other files."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.integrations.callbacks import CallbackAttributes


class Callback:
    """One of a user's script."""

    def __init__(self) -> None:
        self.began, self.ticked = time.time(), time.monotonic()
        self.count, self.total, self.best = 0, 0.0, None
        self.average = nn.Linear(2, 2)
        self.file = object()


def attributes(callback: Any, said: list[str] | None = None) -> CallbackAttributes:
    return CallbackAttributes([callback], [], lambda one: False, (said if said is not None else []).append)


def test_numbers_tensors_and_parts_with_a_state_travel_and_moments_stay() -> None:
    first, second = Callback(), Callback()
    theirs, mine = attributes(first), attributes(second)
    first.count, first.best = 7, torch.tensor([1.0, 2.0])
    first.total += 0.25
    first.ticked, began = time.monotonic(), second.began
    nn.init.ones_(first.average.weight)
    ticked = second.ticked
    mine.put(theirs.state())
    assert (second.count, second.total, second.began, second.ticked) == (7, 0.25, began, ticked)
    assert torch.equal(second.best, first.best)
    assert second.best is not first.best
    assert torch.equal(second.average.weight, first.average.weight)


@pytest.mark.parametrize("clock", [time.time, time.monotonic])
def test_a_sum_that_comes_near_the_clock_is_no_moment(clock: Any) -> None:
    first, second = Callback(), Callback()
    theirs, mine = attributes(first), attributes(second)
    for _ in range(3):
        first.total = clock() - 5.25
        time.sleep(0.01)
        mine.put(theirs.state())
        assert second.total == first.total


def test_a_moment_that_is_read_again_stays_and_so_it_does_while_nothing_happens() -> None:
    first, second = Callback(), Callback()
    theirs, mine = attributes(first), attributes(second)
    before = second.began
    for _ in range(2):
        first.began = time.time()
        for _ in range(2):
            mine.put(theirs.state())
            assert second.began == before


def test_a_callback_that_has_changed_what_cannot_travel_begins_anew_and_is_named() -> None:
    first, second, said = Callback(), Callback(), list[str]()
    theirs, mine = attributes(first), attributes(second, said)
    first.count, first.file = 3, object()
    mine.put(theirs.state())
    assert said == []
    mine.put(theirs.state(), says=True)
    (note,) = said
    assert note.startswith("the callback Callback begins anew: it had changed file, which cannot go on by itself")
    assert second.count == 0
