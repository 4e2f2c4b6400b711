"""Messages through shared memory from whoever sends first, and to several threads at once."""

import os
import signal
import threading
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
from boxes import LONG, barrier, content, in_thread, open_box
from workers import on_workers, outcomes

from lockstep.errors import PeerGone
from lockstep.wire.shared.channel import MAX_SLOT_BYTES
from lockstep.wire.shared.mailbox import Mailbox
from lockstep.wire.shared.turns import Turns

# -- from any source ----------------------------------------------------------------------------------------


def _from_any() -> list[Any]:
    """Worker 0 asks for three messages from anyone, with one tag; others come with another."""
    with open_box() as box:
        if box.world.rank > 0:
            for tag in (5, 6):
                box.send(torch.tensor([box.world.rank]), 0, tag).wait()
            return []
        place = torch.zeros(1, dtype=torch.int64)
        found = []
        for _ in box.world.peers:
            pending = box.receive_any(place, 6, box.world.peers)
            pending.wait()
            found.append([pending.source, int(place)])
        return sorted(found)


def test_from_any_source_each_message_comes_once_with_its_source() -> None:
    assert on_workers(4, _from_any)[0] == [[1, 1], [2, 2], [3, 3]]


def _one_source_leaves(noticed: Barrier) -> list[int]:
    """Worker 1 leaves without a word, and worker 0 knows it before worker 2 sends."""
    with open_box() as box:
        if box.world.rank == 1:
            return []
        if box.world.rank == 2:
            noticed.wait(20)
            box.send(torch.tensor([7]), 0, 6).wait()
            return []
        place = torch.zeros(1, dtype=torch.int64)
        with pytest.raises(PeerGone):
            box.receive(place, 1, 6).wait()
        pending = box.receive_any(place, 6, [1, 2])
        noticed.wait(20)
        pending.wait()
        return [int(place)]


def test_a_source_that_leaves_is_no_loss_to_those_who_wait_for_the_others() -> None:
    assert on_workers(3, _one_source_leaves, barrier(2))[0] == [7]


def _only_from(sent: Barrier) -> list[Any]:
    with open_box() as box:
        if box.world.rank > 0:
            box.send(torch.tensor([box.world.rank]), 0, 6).wait()
            sent.wait(20)
            return []
        sent.wait(20)
        place = torch.zeros(1, dtype=torch.int64)
        pending = box.receive_any(place, 6, [2, 3])
        box.receive(torch.zeros(1, dtype=torch.int64), 1, 6).wait()
        pending.wait()
        return [pending.source == int(place), pending.source]


def test_from_any_of_some_sources_takes_nothing_of_another() -> None:
    matches, source = on_workers(4, _only_from, barrier(4))[0]
    assert matches
    assert source in (2, 3)


def _any_loses_one(noticed: Barrier) -> list[Any]:
    with open_box() as box:
        if box.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if box.world.rank == 2:
            noticed.wait(20)
            return []
        with pytest.raises(PeerGone) as gone:
            box.receive_any(torch.zeros(1), 6, [1, 2]).wait()
        noticed.wait(20)
        return [gone.value.rank]


def test_a_source_that_is_killed_fails_a_receive_from_any() -> None:
    assert outcomes(3, _any_loses_one, barrier(2))[0].value == [1]


# -- threads ------------------------------------------------------------------------------------------------


def _converse(box: Mailbox, tag: int) -> int:
    """Messages of all sizes there and back, each after the answer to the last; gives how many were wrong."""
    wrong = 0
    for number, num_bytes in enumerate([1, 100, LONG, 0, MAX_SLOT_BYTES + 1] * 4):
        for peer in box.world.peers:
            place = torch.zeros(num_bytes, dtype=torch.uint8)
            receiving = box.receive(place, peer, tag)
            box.send(content(num_bytes, tag, number, box.world.rank, peer), peer, tag).wait()
            receiving.wait()
            wrong += not place.equal(content(num_bytes, tag, number, peer, box.world.rank))
    return wrong


def _many_threads() -> list[int]:
    with open_box() as box:
        results = [in_thread(lambda tag=tag: _converse(box, tag)) for tag in range(6)]  # type: ignore[misc]
        return [result() for result in results]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_many_threads_send_receive_and_wait_at_once(num_workers: int) -> None:
    assert on_workers(num_workers, _many_threads) == [[0] * 6] * num_workers


def test_a_busy_holder_lets_in_whoever_waits() -> None:
    turns, entered = Turns(), threading.Event()

    def enter() -> None:
        with turns:
            entered.set()

    turns.acquire()
    guest = in_thread(enter)
    while not turns.is_awaited:
        pass
    turns.pass_on()
    had_its_turn = entered.is_set()
    turns.release()
    guest()
    assert had_its_turn


def _follow(ready: Barrier) -> list[bool]:
    """One thread waits for what comes last, others for what comes before and after it."""
    with open_box() as box:
        if box.world.rank == 1:
            ready.wait(20)
            for tag in (2, 1, 3):
                box.send(content(LONG, tag), 0, tag).wait()
            return []
        places = {tag: torch.empty(LONG, dtype=torch.uint8) for tag in (1, 2, 3)}
        results = [in_thread(box.receive(place, 1, tag).wait) for tag, place in places.items()]
        ready.wait(20)
        errors = [result() for result in results]
        return [place.equal(content(LONG, tag)) for tag, place in places.items()] + [not any(errors)]


def test_when_the_leading_thread_is_done_another_leads() -> None:
    assert on_workers(2, _follow, barrier(2))[0] == [True] * 4
