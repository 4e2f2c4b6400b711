"""Who asks for a batch: a `for` statement, or a call of `next`."""

import sys
from collections.abc import Callable, Iterator

import pytest

from lockstep.script.call_site import is_for_statement


class Asked:
    """Stands for a loader: its first batch is whether a `for` statement has asked for it."""

    def __iter__(self) -> "Asked":
        return self

    def __next__(self) -> bool:
        return is_for_statement(sys._getframe(1))


def handed_on() -> Iterator[bool]:
    yield from Asked()


def augmented() -> Iterator[bool]:
    for batch in Asked():  # noqa: UP028 - this is the case
        yield batch


def drawn_ahead() -> Iterator[bool]:
    batches = iter(Asked())
    while True:
        yield next(batches)


def by_for(batches: Iterator[bool]) -> bool:
    for batch in batches:
        return batch
    raise AssertionError


def by_enumerate(batches: Iterator[bool]) -> bool:
    for _, batch in enumerate(batches):
        return batch
    raise AssertionError


def by_zip(batches: Iterator[bool]) -> bool:
    for _, batch in zip(range(3), batches, strict=False):
        return batch
    raise AssertionError


def by_next(batches: Iterator[bool]) -> bool:
    return next(batches)


@pytest.mark.parametrize("made", [lambda: iter(Asked()), handed_on, augmented], ids=["itself", "yield from", "for"])
@pytest.mark.parametrize("ask", [by_for, by_enumerate, by_zip])
def test_a_for_statement_asks_also_through_generator_functions(
    ask: Callable[[Iterator[bool]], bool], made: Callable[[], Iterator[bool]]
) -> None:
    assert ask(made())


@pytest.mark.parametrize(
    ("ask", "made"),
    [(by_next, lambda: iter(Asked())), (by_next, handed_on), (by_next, augmented), (by_for, drawn_ahead)],
)
def test_a_call_of_next_is_none_wherever_it_stands(
    ask: Callable[[Iterator[bool]], bool], made: Callable[[], Iterator[bool]]
) -> None:
    assert not ask(made())
