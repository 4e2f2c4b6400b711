"""Calls at a worker's door."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from lockstep.elastic.client import EndpointClient, Standpoint, probe
from lockstep.elastic.endpoint import Endpoint
from lockstep.elastic.membership import founded
from lockstep.elastic.membership.view import Attempt, Claim, GenerationId, Liveness, Member, claim_to_json
from lockstep.elastic.recovery import Recovery
from lockstep.elastic.store import Secret

SECRET = Secret(b"of this run")


@pytest.fixture
def door() -> Iterator[Endpoint]:
    door = Endpoint(0, secret=SECRET)
    yield door
    door.close()


def claim(slot: int) -> Claim:
    return Claim(Member(f"uid {slot}", slot, "127.0.0.1:1", fresh=True), generation=0, step=0)


def test_a_call_is_heard_once(door: Endpoint) -> None:
    assert not door.has_claim()
    EndpointClient(door.member.address, SECRET).send_claim(claim(1))
    assert door.has_claim()
    assert [heard.member.slot for heard in door.claims()] == [1]
    assert not door.has_claim()
    assert door.claims() == []


def test_a_call_that_is_looked_at_before_it_is_written_is_heard_afterwards(door: Endpoint) -> None:
    store = EndpointClient(door.member.address, SECRET).store
    number = store.add("calls", 1) - 1
    assert door.claims() == []
    assert door.has_claim(), "whoever has taken a number is about to call"
    store.set(f"call/{number}", claim_to_json(claim(2)))
    assert door.has_claim()
    assert [heard.member.slot for heard in door.claims()] == [2]
    assert not door.has_claim()


def test_a_call_that_is_written_after_a_later_one_of_the_same_worker_is_not_heard(door: Endpoint) -> None:
    store = EndpointClient(door.member.address, SECRET).store
    early, late = store.add("calls", 1) - 1, store.add("calls", 1) - 1
    store.set(f"call/{late}", claim_to_json(claim(1)))
    assert len(door.claims()) == 1
    store.set(f"call/{early}", claim_to_json(claim(1)))
    assert door.claims() == []
    assert not door.has_claim()


def test_who_is_in_a_later_generation_without_the_one_who_asks_is_elsewhere(door: Endpoint) -> None:
    def seen_by(uid: str, generation: int) -> Liveness:
        return probe(door.member, SECRET, Standpoint(uid, generation))

    assert seen_by("left behind", 1) is Liveness.NEW
    door.publish({}, Attempt(GenerationId(2, "w0"), ("w0", "w1")))
    assert seen_by("left behind", 1) is Liveness.ELSEWHERE
    assert seen_by("w1", 1) is Liveness.ALIVE
    assert seen_by("ahead", 2) is Liveness.ALIVE


def keeper(door: Endpoint, *members: Member) -> Recovery:
    """Of a worker that keeps the door for a generation with these members too."""
    nothing = cast(Any, None)
    return Recovery(founded(door.member, (door.member, *members)), door, nothing, nothing, nothing, nothing)


def test_a_member_that_was_given_no_state_and_comes_again_before_anybody_is_missed_is_heard(door: Endpoint) -> None:
    again = claim(1)
    recovery = keeper(door, again.member)
    EndpointClient(door.member.address, SECRET).send_claim(again)
    recovery.has_claims()
    assert recovery.membership.claims == (again,)


def test_a_newcomer_is_kept_at_the_door_until_one_may_be_admitted(door: Endpoint) -> None:
    recovery = keeper(door)
    EndpointClient(door.member.address, SECRET).send_claim(claim(1))
    assert recovery.has_claims()
    assert recovery.has_claims()
    assert recovery.membership.claims == ()
