"""Those who leave a mailbox, by closing it, by dying or by silence, and those who wait for them."""

import os
import signal
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import LONG, RING_BYTES, barrier, content, in_thread, open_box, open_memory
from workers import on_workers, outcomes

from lockstep.errors import PeerGone
from lockstep.wire.exchange import exchange
from lockstep.wire.shared.board import open_board
from lockstep.wire.shared.channel import MAX_SLOT_BYTES
from lockstep.wire.shared.mailbox import open_mailbox
from lockstep.wire.transport import Pending


def _who_is_gone(transfer: Pending) -> Any:
    with pytest.raises(PeerGone) as gone:
        transfer.wait()
    return [gone.value.rank, gone.value.cause]


def _lose_a_peer(sent: Barrier, noticed: Barrier) -> list[Any]:
    """Worker 1 sends two messages and a part of a third, and is killed."""
    with open_box() as box:
        rank = box.world.rank
        if rank == 1:
            for peer in (0, 2):
                box.send(content(MAX_SLOT_BYTES, 0), peer, 1)
                box.send(content(10, 1), peer, 2)
                box.send(content(LONG, 2), peer, 3)
            sent.wait(20)
            os.kill(os.getpid(), signal.SIGKILL)
        sent.wait(20)
        found = [_who_is_gone(box.send(content(LONG, 0), 1, 1))]
        for number, (num_bytes, tag) in enumerate([(MAX_SLOT_BYTES, 1), (10, 2)]):
            place = torch.empty(num_bytes, dtype=torch.uint8)
            box.receive(place, 1, tag).wait()
            found.append(place.equal(content(num_bytes, number)))
        found.append(_who_is_gone(box.receive(torch.empty(LONG, dtype=torch.uint8), 1, 3)))
        noticed.wait(20)
        return found


def test_a_killed_peer_is_named_and_what_it_had_sent_still_arrives() -> None:
    found = outcomes(3, _lose_a_peer, barrier(3), barrier(2))
    named = [1, "its process has ended or closed the connection"]
    assert [found[0].value, found[2].value] == [[named, True, True, named]] * 2
    assert found[1].killed_by == signal.SIGKILL


def _pass_the_blame(first_has_left: Barrier) -> list[Any]:
    """Worker 1 dies; worker 0 notices and leaves; worker 2 waits for worker 0."""
    with open_box() as box:
        rank = box.world.rank
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerGone) as gone:
            box.receive(torch.zeros(1), 1 if rank == 0 else 0, 1).wait()
    first_has_left.wait(20)
    return [gone.value.rank]


def test_who_leaves_because_of_a_death_is_not_taken_for_the_dead() -> None:
    found = outcomes(3, _pass_the_blame, barrier(2))
    assert [found[0].value, found[2].value] == [[1], [1]]


def _leave(has_left: Barrier, noticed: Barrier) -> list[Any]:
    """Worker 1 closes its mailbox, but neither its memory nor its connections."""
    with open_memory() as (memory, world):
        box = open_mailbox(memory, world)
        if world.rank == 1:
            box.send(content(RING_BYTES, 0), 0, 1).wait()
            box.close()
            has_left.wait(20)
            noticed.wait(20)
            return []
        has_left.wait(20)
        place = torch.empty(RING_BYTES, dtype=torch.uint8)
        box.receive(place, 1, 1).wait()
        with pytest.raises(PeerGone) as gone:
            box.receive(place, 1, 1).wait()
        noticed.wait(20)
        box.close()
        return [place.equal(content(RING_BYTES, 0)), gone.value.rank]


def test_closing_loses_no_message_that_was_sent_and_tells_the_peer() -> None:
    assert on_workers(2, _leave, barrier(2), barrier(2))[0] == [True, 1]


def _be_silent(noticed: Barrier) -> list[str]:
    with open_box(timeout_s=0.3) as box:
        if box.world.rank == 1:
            noticed.wait(20)
            return []
        pending = [box.receive(torch.zeros(1), 1, 1), box.send(content(LONG, 0), 1, 1)]
        results = [in_thread(transfer.wait) for transfer in pending]
        found = [repr(result()) for result in results]
        noticed.wait(20)
        return found


def test_a_silent_peer_is_named_after_timeout_s() -> None:
    assert on_workers(2, _be_silent, barrier(2))[0] == [repr(PeerGone(1, "it has been silent for 0.3 s"))] * 2


def _close_while_waiting(by_owner: bool, noticed: Barrier) -> list[str]:
    with open_memory() as (memory, world):
        box = open_mailbox(memory, world)
        if world.rank == 1:
            noticed.wait(20)
            return []
        pending = [
            box.receive(torch.zeros(1), 1, 1),
            box.receive(torch.zeros(1), 1, 2),
            box.send(content(LONG, 0), 1, 1),
        ]
        results = [in_thread(transfer.wait) for transfer in pending]
        (memory.neighbours if by_owner else box).close()
        sentences = [repr(result()) for result in results]
        noticed.wait(20)
        box.close()
        with pytest.raises(PeerGone) as gone:
            box.send(torch.zeros(1), 1, 1)
        return [*sentences, repr(gone.value)]


@pytest.mark.parametrize("by_owner", [True, False], ids=["connections", "mailbox"])
def test_closing_ends_the_waits_of_all_threads(by_owner: bool) -> None:
    closed = repr(PeerGone(1, "the connection was closed here"))
    assert on_workers(2, _close_while_waiting, by_owner, barrier(2))[0] == [closed] * 4


def _open_again_and_again() -> list[int]:
    """How many more files and mapped segments there are after ten more mailboxes, beside a board."""
    with open_memory() as (memory, world):
        board = open_board(memory)
        found = []
        for _ in range(11):
            box = open_mailbox(memory, world)
            exchange(box, torch.zeros(1, dtype=torch.uint8))
            box.close()
            del box
            maps = Path("/proc/self/maps").read_text().count("memfd:lockstep")
            found.append((len(os.listdir("/proc/self/fd")), maps))
            board.meet(b"")
            board.closing_barrier()
        return [found[-1][0] - found[0][0], found[-1][1] - found[1][1]]


def test_closed_mailboxes_leave_no_files_and_no_memory() -> None:
    assert on_workers(3, _open_again_and_again) == [[0, 0]] * 3
