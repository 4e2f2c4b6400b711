"""Where iterators of the script stand."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.script.restart.iterators import is_iterator, text_of_iterator


def falling(factor: float) -> Iterator[float]:
    shown, w = 0, 1.0
    while True:
        shown += 1
        yield w
        w *= factor


def twice(values: Any) -> Iterator[Any]:
    for number, value in enumerate(values):
        print(number)
        yield value
    yield from falling(0.5)


def stands(value: Any) -> str | None:
    return text_of_iterator(value, lambda one: repr(one) if isinstance(one, int | float) else None)


WAYS = {
    "a list": lambda: iter([1, 2, 3]),
    "a range": lambda: iter(range(3)),
    "a table": lambda: iter({"a": 1, "b": 2, "c": 3}.items()),
    "what goes around": lambda: itertools.cycle([1, 2, 3]),
    "two together": lambda: zip([1, 2, 3], itertools.count(), strict=False),
    "what is mapped": lambda: map(str, [1, 2, 3]),
    "numbers": lambda: itertools.count(2),
    "an expression": lambda: (2 * number for number in range(3)),
    "a generator function": lambda: falling(0.5),
    "one that takes from another": lambda: twice([]),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_iterator_that_has_gone_on_stands_elsewhere_and_one_that_was_made_anew_where_it_began(way: str) -> None:
    one, other, third = (WAYS[way]() for _ in range(3))
    next(one), next(one), next(third)
    assert all(is_iterator(each) for each in (one, other))
    assert len({stands(each) for each in (one, other, third)}) == 3
    next(other), next(other)
    assert stands(one) == stands(other)


def test_what_a_generator_only_shows_is_not_where_it_stands() -> None:
    one = twice([5, 6])
    assert next(one) == 5
    assert stands(one) == f"a generator at line {one.gi_frame.f_lineno} with value=5"


def test_one_that_is_at_its_end_is_so() -> None:
    one = (number for number in ())
    assert list(one) == []
    assert stands(one) == "a generator at its end"


def test_nothing_is_known_of_iterators_of_other_kinds() -> None:
    assert not is_iterator(itertools.repeat(1))
    assert stands(map(str, itertools.repeat(1))) is None
