"""Iterators around a pass that begin anew although the pass does not."""

from collections.abc import Iterator
from itertools import count, cycle, islice

import pytest

from lockstep.script.unsaved import restarted_iterator


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
