"""The rhythm of loops and updates, and whether a resumed run goes on in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.script.restart.rhythm import Rhythm, loop, repeated, update

L, G, U, V = loop("train.py:3"), loop("train.py:9"), update("optimizer"), update("optimizer2")


@given(st.lists(st.sampled_from([L, G, U]), min_size=1, max_size=12), st.integers(3, 6), st.data())
def test_what_is_repeated_is_found_wherever_it_is_cut_off(part: list[str], times: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(part) - 1))
    history = part * times + part[:cut]
    found = list(repeated(history))
    assert found
    assert history[-3 * len(found) :] == found * 3


def test_an_irregular_history_says_nothing() -> None:
    assert list(repeated([L, U, L, L, U, L, L, L, U])) == []


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_run_that_goes_on_in_its_rhythm_is_not_stopped(cut: int) -> None:
    part = [L, L, U]
    rhythm = Rhythm()
    rhythm.expect(part * 5 + part[:cut])
    assert [rhythm.saw(event) for event in (part * 4)[cut:]] == [None] * (12 - cut)


def test_an_update_where_none_was_due_is_named() -> None:
    rhythm = Rhythm()
    rhythm.expect([L, L, U] * 5 + [L])
    assert [rhythm.saw(event) for event in (L, L, U)] == [None, None, L]


def test_a_generator_that_comes_too_late_is_named() -> None:
    rhythm = Rhythm()
    rhythm.expect(([L, U] * 5 + [G, V]) * 4 + [L, U] * 3)
    assert [rhythm.saw(event) for event in (L, U, L, U, L)] == [None, None, None, None, G]


def test_an_update_that_is_left_out_once_is_none_of_our_business() -> None:
    rhythm = Rhythm()
    rhythm.expect([L, L, U] * 5)
    assert [rhythm.saw(event) for event in (L, L, L, L, U)] == [None] * 5


def test_with_one_loop_in_each_repetition_there_is_nothing_to_be_out_of() -> None:
    rhythm = Rhythm()
    rhythm.expect([L, U] * 9)
    assert [rhythm.saw(event) for event in (L, L, G, V, U)] == [None] * 5


def test_after_one_whole_repetition_the_script_is_believed() -> None:
    rhythm = Rhythm()
    rhythm.expect([L, L, U] * 5)
    assert [rhythm.saw(event) for event in (L, L, U, U, L, U)] == [None] * 6


def test_a_run_that_is_resumed_again_goes_on_in_the_rhythm_of_both() -> None:
    first, second = Rhythm(), Rhythm()
    first.expect([L, L, U] * 5)
    first.saw(L)
    second.expect(first.history)
    assert [second.saw(event) for event in (L, L)] == [None, None]
    second.expect([*first.history, L])
    assert [second.saw(event) for event in (U, L, U)] == [None, None, L]
