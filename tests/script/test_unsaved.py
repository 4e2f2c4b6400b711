"""What begins anew although a pass or a training goes on: iterators around a pass, and schedulers nobody tracks."""

from collections.abc import Callable, Iterator
from itertools import count, cycle, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from lockstep.script.restart.wrapped_passes import restarted_iterator
from lockstep.script.schedulers import is_fresh, is_inside, saves_an_optimizer, untracked


def numbers() -> Iterator[int]:
    yield from range(10)


def through(inner: Iterator[int]) -> Iterator[int]:
    yield from inner


@pytest.mark.parametrize(
    "wrap",
    [
        lambda running: islice(running, 4),
        lambda running: islice(enumerate(running), 4),
        lambda running: islice(through(running), 4),
        lambda running: enumerate(islice(running, 1, 4)),
        lambda running: zip(range(4), islice(running, 4), strict=False),
    ],
)
def test_a_slice_is_found_wherever_it_is(wrap: object) -> None:
    running = numbers()
    wrapped = wrap(running)  # type: ignore[operator]
    next(wrapped)
    assert "itertools.islice counts" in str(restarted_iterator(running, [running]))


def test_what_is_zipped_with_a_pass_begins_anew_unless_it_is_a_pass_or_endless() -> None:
    running, other = numbers(), numbers()
    together = zip(running, [1, 2, 3], strict=False)
    assert "together with a list_iterator" in str(restarted_iterator(running, [running, other]))
    del together
    together = zip(count(), running, other, strict=False)
    next(together)
    assert restarted_iterator(running, [running, other]) is None
    del together
    numbered = zip(count(), enumerate(running), strict=False)
    next(numbered)
    assert restarted_iterator(running, [running]) is None


def test_at_the_start_of_a_pass_a_slice_is_as_it_should_be() -> None:
    running = numbers()
    wrapped = islice(running, 4)
    next(wrapped)
    assert restarted_iterator(running, [running], at_start=True) is None


def test_a_cycle_begins_anew_too() -> None:
    running = numbers()
    together = zip(running, cycle([1, 2, 3]), strict=False)
    next(together)
    assert "together with a cycle, which starts from its beginning" in str(restarted_iterator(running, [running]))
    again = cycle(running)
    del together
    next(again)
    for at_start in (False, True):
        assert "itertools.cycle gives again" in str(restarted_iterator(running, [running], at_start=at_start))


def test_a_pass_in_a_loop_or_under_a_progress_bar_goes_on() -> None:
    running = numbers()
    assert restarted_iterator(running, [running]) is None
    bar = through(map(str, enumerate(running)))  # type: ignore[arg-type]
    next(bar)
    assert restarted_iterator(running, [running]) is None


def optimizer() -> SGD:
    return SGD(nn.Linear(2, 1).parameters(), lr=0.1)


HELD: dict[str, Callable[[Any], Any]] = {
    "itself": lambda one: one,
    "an attribute": lambda one: SimpleNamespace(mine=one),
    "an attribute of one": lambda one: SimpleNamespace(inner=SimpleNamespace(mine=one)),
    "in a list": lambda one: SimpleNamespace(all=[1, one]),
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_a_scheduler_is_tracked_wherever_it_is_held(held: Callable[[Any], Any]) -> None:
    one = optimizer()
    scheduler = LinearLR(one)
    trainer = SimpleNamespace(optimizer=one, scheduler=scheduler)
    assert untracked([one], []) == [scheduler]
    assert untracked([one], [held(scheduler)]) == []
    assert is_inside(scheduler, [held(scheduler)])
    del trainer


def test_a_scheduler_of_another_optimizer_or_inside_of_another_scheduler_is_not_named() -> None:
    one, other = optimizer(), optimizer()
    parts: list[LRScheduler] = [LinearLR(one), LinearLR(one)]
    whole = SequentialLR(one, parts, milestones=[2])
    elsewhere = LinearLR(other)
    assert untracked([one], []) == [whole]
    assert untracked([one], [whole, elsewhere]) == []


def test_what_is_held_far_inside_or_by_an_optimizer_is_not_tracked() -> None:
    one = optimizer()
    scheduler = LinearLR(one)
    one.mine = scheduler  # type: ignore[attr-defined]
    far = HELD["an attribute"](HELD["an attribute of one"](scheduler))
    assert untracked([one], [one, far]) == [scheduler]
    assert not is_inside(scheduler, [far, optimizer()])


def test_a_table_holds_its_values() -> None:
    scheduler = LinearLR(optimizer())
    assert is_inside(scheduler, [{"mine": scheduler}])
    assert not is_inside(scheduler, [{"other": 1}, "text", [2]])


def test_a_scheduler_is_fresh_until_its_first_step() -> None:
    one = optimizer()
    scheduler = LinearLR(one)
    assert is_fresh(scheduler)
    one.step()
    scheduler.step()
    assert not is_fresh(scheduler)


@pytest.mark.parametrize(
    ("state", "has_one"),
    [
        (lambda: optimizer().state_dict(), True),
        (lambda: {"mine": optimizer().state_dict()}, True),
        (lambda: LinearLR(optimizer()).state_dict(), False),
        (lambda: {"average": {"weight": torch.ones(2)}}, False),
        (lambda: (1, 2), False),
    ],
)
def test_whether_an_object_saves_an_optimizer_shows_in_its_state(state: Callable[[], Any], has_one: bool) -> None:
    assert saves_an_optimizer(SimpleNamespace(state_dict=state)) == has_one
