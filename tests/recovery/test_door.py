"""Calls at a worker's door."""

from collections.abc import Iterator

import pytest

from lockstep.run.membership.view import Claim, Member, claim_to_json
from lockstep.run.recovery.door import Door
from lockstep.run.recovery.guest import Guest


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
