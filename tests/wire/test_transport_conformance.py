"""The conformance suite of transports: what `send`, `receive`, `awaited` and `close` do on every one of them."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
from test_wires import open_wire
from workers import on_workers, outcomes

from lockstep.errors import PeerGone
from lockstep.wire import broadcast, exchange
from lockstep.wire.exchange import exchange_texts
from lockstep.wire.network.deadline import Deadline
from lockstep.wire.network.hierarchical import Column
from lockstep.wire.transport import InProcess, Transport

TRANSPORTS = pytest.mark.parametrize("kind", ["gloo", "shared", "column", "hierarchical"])
WORLDS = pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
FIRST, SECOND, GO_AHEAD, WAITED_FOR = 4, 5, 6, 7
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64)
LONG = 1_500_000
"""Elements of a message that no transport takes at once."""


@contextmanager
def open_transport(kind: str) -> Iterator[Transport]:
    """`column`: as over several hosts, whose workers with one place are a world of their own; here all of them."""
    with open_wire("gloo" if kind == "column" else kind) as wire:
        is_column = kind == "column" and wire.world.size > 1
        ranks = range(wire.world.size)
        yield Column(wire.transport, ranks, wire.world.rank) if is_column else wire.transport


def _talk(kind: str) -> dict[str, Any]:
    """What this worker received in each of several conversations with all others."""
    with open_transport(kind) as transport:
        return {
            "records": _exchanged(transport),
            "in order": _numbers(transport, [FIRST]),
            "by tag": _numbers(transport, [FIRST, SECOND]),
            "dtypes": _all_dtypes(transport),
            "long": _long_messages(transport),
        }


def _exchanged(transport: Transport) -> list[Any]:
    rank, size = transport.world.rank, transport.world.size
    records = exchange(transport, torch.tensor([rank, 7], dtype=torch.uint8))
    texts = exchange_texts(transport, "ü" * (rank + 1))
    flat = torch.full((5,), float(rank))
    broadcast(transport, flat, source=size - 1)
    return [[record.tolist() for record in records], texts, flat.tolist()]


def _numbers(transport: Transport, tags: list[int]) -> list[list[int]]:
    """Twenty numbers for each tag to each peer; tags are received in the other order than they were sent."""
    found = []
    for peer in transport.world.peers:
        sent = [torch.full((1,), float(100 * tag + n)) for tag in tags for n in range(20)]
        pending = [transport.send(value, peer, tags[place // 20]) for place, value in enumerate(sent)]
        for tag in reversed(tags):
            places = [torch.zeros(1) for _ in range(20)]
            for receive in [transport.receive(place, peer, tag) for place in places]:
                receive.wait()
                receive.wait()  # a second wait returns at once
            found.append([int(place) for place in places])
        for send in pending:
            send.wait()
    return found


def _all_dtypes(transport: Transport) -> bool:
    right = True
    for peer in transport.world.peers:
        for dtype in DTYPES:
            sent, place = torch.arange(9).to(dtype), torch.zeros(9, dtype=dtype)
            pending = [transport.receive(place, peer, FIRST), transport.send(sent, peer, FIRST)]
            for transfer in pending:
                transfer.wait()
            right = right and torch.equal(place, sent)
    return right


def _long_messages(transport: Transport) -> bool:
    """All send before anyone receives: no worker blocks another."""
    peers = transport.world.peers
    sends = [transport.send(torch.full((LONG,), float(transport.world.rank)), peer, FIRST) for peer in peers]
    places = {peer: torch.zeros(LONG) for peer in peers}
    receives = [transport.receive(place, peer, FIRST) for peer, place in places.items()]
    for transfer in [*receives, *sends]:
        transfer.wait()
    return all(bool((place == peer).all()) for peer, place in places.items())


@cache
def talked(kind: str, num_workers: int) -> list[dict[str, Any]]:
    """All conversations share their workers."""
    return on_workers(num_workers, _talk, kind)


@TRANSPORTS
@WORLDS
def test_every_worker_receives_all_records_in_rank_order(kind: str, num_workers: int) -> None:
    ranks = range(num_workers)
    expected = [[[r, 7] for r in ranks], ["ü" * (r + 1) for r in ranks], [float(num_workers - 1)] * 5]
    assert [found["records"] for found in talked(kind, num_workers)] == [expected] * num_workers


@TRANSPORTS
def test_messages_with_one_tag_arrive_in_the_order_they_were_sent(kind: str) -> None:
    assert [found["in order"] for found in talked(kind, 3)] == [[list(range(400, 420))] * 2] * 3


@TRANSPORTS
def test_messages_with_different_tags_are_not_taken_for_one_another(kind: str) -> None:
    expected = [list(range(500, 520)), list(range(400, 420))] * 2
    assert [found["by tag"] for found in talked(kind, 3)] == [expected] * 3


@TRANSPORTS
def test_tensors_of_any_dtype_arrive_as_they_were_sent(kind: str) -> None:
    assert all(found["dtypes"] for found in talked(kind, 3))


@TRANSPORTS
def test_workers_that_send_each_other_long_messages_do_not_block(kind: str) -> None:
    assert all(found["long"] for found in talked(kind, 3))


def _wait_for_worker_1(kind: str) -> list[Any]:
    """Worker 0 waits, on a thread of its own, for worker 1, which waits for its message: whom does worker 0 await?"""
    with open_transport(kind) as transport:
        rank, before, place = transport.world.rank, transport.awaited(), torch.zeros(1)
        if rank == 0:
            waiting = threading.Thread(target=lambda: transport.receive(place, 1, WAITED_FOR).wait())
            waiting.start()
            Deadline(20.0).until(lambda: transport.awaited() == [1])
            transport.send(torch.zeros(1), 1, GO_AHEAD).wait()
            waiting.join()
        elif rank == 1:
            transport.receive(place, 0, GO_AHEAD).wait()
            transport.send(torch.zeros(1), 0, WAITED_FOR).wait()
        return [before, transport.awaited()]


@TRANSPORTS
def test_a_worker_names_those_for_whom_it_waits_and_only_while_it_does(kind: str) -> None:
    assert on_workers(3, _wait_for_worker_1, kind) == [[[], []]] * 3


def _lose_a_peer(kind: str, both_noticed: Barrier) -> list[Any]:
    with open_transport(kind) as transport:
        exchange(transport, torch.zeros(1, dtype=torch.uint8))
        if transport.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerGone) as gone:
            exchange(transport, torch.zeros(1, dtype=torch.uint8))
        both_noticed.wait(20)
        return [gone.value.rank, transport.awaited()]


@TRANSPORTS
def test_a_killed_peer_is_named_by_the_survivors_who_await_nobody_then(kind: str) -> None:
    found = outcomes(3, _lose_a_peer, kind, get_context("fork").Barrier(2))
    assert [found[0].value, found[2].value] == [[1, []]] * 2
    assert found[1].killed_by == signal.SIGKILL


def _close_while_waiting(kind: str) -> list[Any]:
    """Worker 0 closes the wire while a thread of its own waits; then it closes again, and sends."""
    found: list[Any] = []
    with open_wire(kind) as wire:
        if wire.world.rank == 0:

            def wait() -> None:
                with pytest.raises(PeerGone):
                    wire.transport.receive(torch.zeros(1), 1, WAITED_FOR).wait()
                found.append("ended")

            waiting = threading.Thread(target=wait)
            waiting.start()
            Deadline(20.0).until(lambda: wire.transport.awaited() == [1])
            wire.transport.close()
            waiting.join()
            wire.transport.close()
            with pytest.raises(PeerGone):
                wire.transport.send(torch.zeros(1), 1, FIRST)
            found.append(wire.transport.awaited())
        else:  # stays until worker 0 has closed
            with pytest.raises(PeerGone):
                wire.transport.receive(torch.zeros(1), 0, GO_AHEAD).wait()
    return found


@pytest.mark.parametrize("kind", ["gloo", "shared"])
def test_close_ends_a_wait_on_another_thread_and_may_be_called_twice(kind: str) -> None:
    assert on_workers(2, _close_while_waiting, kind)[0] == ["ended", []]


def test_a_worker_that_is_alone_waits_for_nobody_and_has_nobody_to_send_to() -> None:
    alone = InProcess()
    assert alone.awaited() == []
    for transfer in (alone.send, alone.receive):
        with pytest.raises(ValueError, match="a world of one worker has no worker 1"):
            transfer(torch.zeros(1), 1, FIRST)
