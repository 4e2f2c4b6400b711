"""Calls at a worker's door."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from lockstep.elastic.client import Guest
from lockstep.elastic.endpoint import Door
from lockstep.elastic.membership import founded
from lockstep.elastic.membership.view import Claim, Member, claim_to_json
from lockstep.elastic.recovery import Recovery


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door(0)
    yield door
    door.close()


def claim(slot: int) -> Claim:
    return Claim(Member(f"uid {slot}", slot, "127.0.0.1:1", fresh=True), generation=0, step=0)


def test_a_call_is_heard_once(door: Door) -> None:
    assert not door.has_call()
    Guest(door.member.door).call(claim(1))
    assert door.has_call()
    assert [heard.member.slot for heard in door.calls()] == [1]
    assert not door.has_call()
    assert door.calls() == []


def test_a_call_that_is_looked_at_before_it_is_written_is_heard_afterwards(door: Door) -> None:
    store = Guest(door.member.door).store
    number = store.add("calls", 1) - 1
    assert door.calls() == []
    assert door.has_call(), "whoever has taken a number is about to call"
    store.set(f"call/{number}", claim_to_json(claim(2)))
    assert door.has_call()
    assert [heard.member.slot for heard in door.calls()] == [2]
    assert not door.has_call()


def keeper(door: Door, *members: Member) -> Recovery:
    """Of a worker that keeps the door for a generation with these members too."""
    nothing = cast(Any, None)
    return Recovery(founded(door.member, (door.member, *members)), door, nothing, nothing, nothing, nothing)


def test_a_member_that_was_given_no_state_and_comes_again_before_anybody_is_missed_is_heard(door: Door) -> None:
    again = claim(1)
    recovery = keeper(door, again.member)
    Guest(door.member.door).call(again)
    recovery.hears()
    assert recovery.membership.claims == (again,)


def test_a_newcomer_is_kept_at_the_door_until_one_may_be_admitted(door: Door) -> None:
    recovery = keeper(door)
    Guest(door.member.door).call(claim(1))
    assert recovery.hears()
    assert recovery.hears()
    assert recovery.membership.claims == ()
