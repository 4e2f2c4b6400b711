"""Messages through shared memory between real workers of one host."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import on_workers, outcomes

from lockstep.errors import BadArgument, Disagreement, PeerGone
from lockstep.wire.exchange import broadcast, exchange, exchange_texts
from lockstep.wire.shared import semaphores
from lockstep.wire.shared.board import open_board
from lockstep.wire.shared.channel import INBOUND_BYTES, MAX_SLOT_BYTES, NUM_SLOTS, Chunk, Inbound, Layout, Outbound
from lockstep.wire.shared.mailbox import Mailbox, open_mailbox
from lockstep.wire.shared.matching import Matching
from lockstep.wire.shared.memory import Memory
from lockstep.wire.shared.neighbours import connect
from lockstep.wire.shared.transfers import Line, Receiving, Sending
from lockstep.wire.shared.turns import Turns
from lockstep.wire.transport import Pending
from lockstep.world import World

RING_BYTES = NUM_SLOTS * MAX_SLOT_BYTES
"""What two workers can have on the way in one direction while nobody takes it."""

LONG = 3 * RING_BYTES + 5


@contextmanager
def open_memory(timeout_s: float = 20.0) -> Iterator[tuple[Memory, World]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listen = {"master_listen_fd": int(os.environ["LOCKSTEP_LISTEN_FD"])} if rank == 0 else {}
    store = dist.TCPStore(
        "127.0.0.1",
        int(os.environ["MASTER_PORT"]),
        size,
        rank == 0,
        timedelta(seconds=20),
        wait_for_workers=False,
        multi_tenant=False,
        **listen,
    )
    world = World(rank, size, rank, size)
    memory = Memory(connect(world, range(size), store, timeout_s))
    with closing(memory), closing(memory.neighbours):
        yield memory, world


@contextmanager
def open_box(timeout_s: float = 20.0) -> Iterator[Mailbox]:
    with open_memory(timeout_s) as (memory, world), closing(open_mailbox(memory, world)) as box:
        yield box


def barrier(num_workers: int) -> Barrier:
    return get_context("fork").Barrier(num_workers)


NOISE = torch.randint(0, 256, (20 * 2**20 + 2**16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def content(num_bytes: int, *key: int) -> torch.Tensor:
    """Bytes that differ from those of a message with another key, also if they are short of a chunk or out of order."""
    start = hash(key) % 2**16
    return NOISE[start : start + num_bytes]


def in_thread(job: Callable[[], Any]) -> Callable[[], Any]:
    """Starts `job` on a thread of its own; gives a function that waits for what it returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(job())
        except Exception as error:  # noqa: BLE001 - told to the test
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(30)
        return found[0]

    return result


# -- what arrives -------------------------------------------------------------------------------------------

Message = tuple[int, int, int, int]
"""Source, target, tag, bytes."""

SIZES = st.one_of(
    st.sampled_from([0, 1, 64, MAX_SLOT_BYTES - 1, MAX_SLOT_BYTES, MAX_SLOT_BYTES + 1, RING_BYTES, LONG]),
    st.integers(0, 2 * MAX_SLOT_BYTES),
)


@st.composite
def patterns(draw: st.DrawFn) -> tuple[int, list[Message], int]:
    size = draw(st.integers(2, 4))
    pairs = st.sampled_from([(source, target) for source in range(size) for target in range(size) if source != target])
    messages = draw(st.lists(st.tuples(pairs, st.sampled_from([-1, 1, 2**40]), SIZES), max_size=25))
    return size, [(*pair, tag, num_bytes) for pair, tag, num_bytes in messages], draw(st.integers(0, 1000))


def _shuffled(messages: list[tuple[int, Message]], chance: random.Random) -> list[tuple[int, Message]]:
    """Any order that keeps messages of one pair and tag as they are."""
    streams: dict[tuple[int, ...], list[tuple[int, Message]]] = {}
    for number, message in messages:
        streams.setdefault(message[:3], []).append((number, message))
    turns = [key for key, stream in streams.items() for _ in stream]
    chance.shuffle(turns)
    return [streams[key].pop(0) for key in turns]


def _carry_out(messages: list[Message], seed: int) -> list[int]:
    """Posts all messages of this worker in some order, waits in another; gives those that arrived wrong."""
    with open_box() as box:
        rank = box.world.rank
        chance = random.Random(1000 * seed + rank)
        mine = [(number, message) for number, message in enumerate(messages) if rank in message[:2]]
        pending, places = [], {}
        for number, (source, target, tag, num_bytes) in _shuffled(mine, chance):
            if source == rank:
                pending.append(box.send(content(num_bytes, number), target, tag))
            else:
                places[number] = torch.zeros(num_bytes, dtype=torch.uint8)
                pending.append(box.receive(places[number], source, tag))
        chance.shuffle(pending)
        for transfer in pending:
            transfer.wait()
        return [number for number, place in places.items() if not place.equal(content(messages[number][3], number))]


@settings(max_examples=20)
@given(patterns())
def test_any_messages_posted_and_waited_for_in_any_order_arrive_whole_and_in_order(
    pattern: tuple[int, list[Message], int],
) -> None:
    num_workers, messages, seed = pattern
    assert on_workers(num_workers, _carry_out, messages, seed) == [[]] * num_workers


def _both_ways() -> bool:
    with open_box() as box:
        peer = 1 - box.world.rank
        place = torch.zeros(20 * 2**20, dtype=torch.uint8)
        sending = box.send(content(place.numel(), box.world.rank), peer, 2)
        receiving = box.receive(place, peer, 2)
        sending.wait()
        receiving.wait()
        return place.equal(content(place.numel(), peer))


def test_two_workers_that_send_each_other_20_MiB_do_not_block_each_other() -> None:
    assert on_workers(2, _both_ways) == [True, True]


def _in_every_dtype() -> list[str]:
    """The dtypes that arrived wrong."""
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn"
    wrong = []
    with open_box() as box:
        peer = 1 - box.world.rank
        for name in names.split():
            dtype = getattr(torch, name)
            value = content(64, len(name)).bitwise_and(1 if dtype == torch.bool else 255)
            place = torch.empty(64, dtype=torch.uint8).view(dtype)
            pending = [box.send(value.view(dtype), peer, 1), box.receive(place, peer, 1)]
            for transfer in pending:
                transfer.wait()
            if not place.view(torch.uint8).equal(value):
                wrong.append(name)
    return wrong


def test_every_dtype_arrives_bit_by_bit() -> None:
    assert on_workers(2, _in_every_dtype) == [[], []]


def _conjugate() -> list[complex]:
    """Tensors whose memory does not hold their values, on both sides."""
    with open_box() as box:
        peer = 1 - box.world.rank
        place = torch.zeros(2, dtype=torch.complex64)
        pending = [box.send(torch.tensor([1 + 2j, 3 - 4j]).conj(), peer, 1), box.receive(place.conj(), peer, 1)]
        for transfer in pending:
            transfer.wait()
        return [place.real.tolist(), place.imag.tolist()]


def test_what_is_not_plain_memory_is_copied_through() -> None:
    assert on_workers(2, _conjugate) == [[[1.0, 3.0], [2.0, -4.0]]] * 2


def _talk() -> list[Any]:
    with open_box() as box:
        rank = box.world.rank
        records = exchange(box, torch.tensor([rank, 7], dtype=torch.uint8))
        texts = exchange_texts(box, "ü" * (rank + 1))
        flat = torch.full((5,), float(rank))
        broadcast(box, flat, source=box.world.size - 1)
        return [[record.tolist() for record in records], texts, flat.tolist()]


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_small_talk_works_over_it(num_workers: int) -> None:
    ranks = range(num_workers)
    expected = [[[r, 7] for r in ranks], ["ü" * (r + 1) for r in ranks], [float(num_workers - 1)] * 5]
    assert on_workers(num_workers, _talk) == [expected] * num_workers


# -- when it arrives ----------------------------------------------------------------------------------------


def _send_into_free_slots(done: Barrier) -> list[bool]:
    with open_box() as box:
        if box.world.rank == 0:
            fits = box.send(content(RING_BYTES, 0), 1, 1)
            too_much = box.send(content(1, 1), 1, 1)
            found = [fits.done, too_much.done]
            done.wait(20)
            too_much.wait()
            return found
        done.wait(20)
        places = [torch.empty(RING_BYTES, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)]
        for place in places:
            box.receive(place, 0, 1).wait()
        return [place.equal(content(place.numel(), number)) for number, place in enumerate(places)]


def test_a_send_that_fits_the_free_slots_is_complete_before_anyone_receives_it() -> None:
    assert on_workers(2, _send_into_free_slots, barrier(2)) == [[True, False], [True, True]]


def _later_tags_first() -> list[bool]:
    """Long messages before and after the one that is received first."""
    with open_box() as box:
        if box.world.rank == 0:
            pending = [box.send(content(LONG, tag), 1, tag) for tag in range(4)]
            for transfer in pending:
                transfer.wait()
            return []
        arrived = []
        for tag in (3, 1, 0, 2):
            place = torch.empty(LONG, dtype=torch.uint8)
            box.receive(place, 0, tag).wait()
            arrived.append(place.equal(content(LONG, tag)))
        return arrived


def test_a_message_nobody_asked_for_yet_is_kept_and_blocks_no_other() -> None:
    assert on_workers(2, _later_tags_first)[1] == [True] * 4


def _several_kept() -> list[int]:
    with open_box() as box:
        if box.world.rank == 0:
            for value, tag in [(1, 5), (2, 5), (3, 5), (4, 6)]:
                box.send(torch.tensor([value]), 1, tag).wait()
            return []
        arrived = []
        for tag in (6, 5, 5, 5):
            place = torch.zeros(1, dtype=torch.int64)
            box.receive(place, 0, tag).wait()
            arrived.append(int(place))
        return arrived


def test_messages_that_were_kept_are_given_out_in_the_order_they_were_sent() -> None:
    assert on_workers(2, _several_kept)[1] == [4, 1, 2, 3]


def test_a_receive_that_was_given_up_is_not_written_to_any_more() -> None:
    matching, place, value = Matching(rank=0), torch.zeros(8, dtype=torch.uint8), content(4, 0)
    receiving = Receiving(None, place, (1,), 5)  # type: ignore[arg-type]  # nobody waits for it
    assert not matching.post(receiving)
    half = Chunk(tag=5, message_bytes=8, num_bytes=4, asks=False, address=value.data_ptr())
    assert matching.take(1, half) is None
    matching.withdraw(receiving)
    assert matching.take(1, half) is None
    assert place.equal(torch.cat([value, torch.zeros(4, dtype=torch.uint8)]))


def _nothing() -> Sending:
    return Sending(None, torch.empty(0), 1, 0)  # type: ignore[arg-type]  # nobody waits for it


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=12))
def test_small_talk_waits_for_one_chunk_of_each_other_stream_at_most(sends: list[tuple[int, int]]) -> None:
    line, left, order = Line(), {}, []
    for tag, num_chunks in sends:
        sending = _nothing()
        sending.tag = tag
        left[sending] = num_chunks
        line.add(sending)
    while line:
        first = line.first()
        left[first] -= 1
        line.advance(left[first] == 0)
        order.append((first.tag, {sending.tag for sending, num in left.items() if num}))
    for (tag, waiting), (next_tag, _) in pairwise(order):
        assert next_tag != tag or waiting == {tag}


@given(st.integers(1, 2000))
def test_a_worker_has_about_4_MiB_for_all_that_comes_in(num_peers: int) -> None:
    layout = Layout(num_peers)
    small = layout.slot_bytes == 4096  # thousands of workers: slots are not made smaller than a page
    assert layout.segment_bytes <= 1.05 * INBOUND_BYTES + 1024 or small
    assert layout.segment_bytes >= 0.9 * INBOUND_BYTES or layout.slot_bytes == MAX_SLOT_BYTES


@given(st.lists(st.booleans(), max_size=40))
def test_a_sender_that_found_no_free_slot_is_rung_although_its_chunks_did_not_ask(puts: list[bool]) -> None:
    """Both ends of a channel in this process, which put and take in any order."""
    layout = Layout(1)
    sender, receiver = (torch.zeros(layout.segment_bytes, dtype=torch.uint8) for _ in range(2))
    layout.initialize(sender)
    layout.initialize(receiver)
    outbound = Outbound(layout, receiver, 0, receiver.data_ptr())
    inbound = Inbound(layout, receiver, 0, sender.data_ptr())
    for put in puts:
        if not put:
            _take_all(inbound, at_most=1)
        elif outbound.ready():
            outbound.put(Chunk(tag=1, message_bytes=0, num_bytes=0, asks=False, address=0))
        else:
            _hush(sender)
            assert _take_all(inbound, at_most=NUM_SLOTS + 1) == NUM_SLOTS
            assert semaphores.take(sender.data_ptr())


def _take_all(inbound: Inbound, at_most: int) -> int:
    for taken in range(at_most):
        chunk = inbound.get()
        if chunk is None:
            return taken
        inbound.free(chunk)
    return at_most


def _hush(segment: torch.Tensor) -> None:
    while semaphores.take(segment.data_ptr()):
        pass


# -- sizes that differ --------------------------------------------------------------------------------------


def _other_sizes(mine: int, theirs: int, early: bool, posted: Barrier) -> list[Any]:
    with open_box() as box:
        if box.world.rank == 0:
            pending = [box.send(content(theirs, 0), 1, 9), box.send(content(5, 1), 1, 9)]
            if early:
                posted.wait(20)
            for transfer in pending:
                transfer.wait()
            return []
        if early:
            posted.wait(20)
        with pytest.raises(Disagreement) as found:
            box.receive(torch.empty(mine, dtype=torch.uint8), 0, 9).wait()
        place = torch.empty(5, dtype=torch.uint8)
        box.receive(place, 0, 9).wait()
        return [str(found.value), place.equal(content(5, 1))]


@pytest.mark.parametrize(("mine", "theirs"), [(8, 4), (4, LONG), (LONG, 0)])
@pytest.mark.parametrize("early", [True, False], ids=["sent before", "sent any time"])
def test_sizes_that_differ_are_both_named_and_the_next_message_arrives(mine: int, theirs: int, early: bool) -> None:
    sentence, next_arrived = on_workers(2, _other_sizes, mine, theirs, early, barrier(2))[1]
    assert f"bytes of a message with tag 9: worker 1 has {mine}, worker 0 has {theirs}." in sentence
    assert next_arrived


def _refused() -> list[str]:
    with open_box() as box:
        sentences = []
        for attempt in (
            lambda: box.send(torch.zeros(1), box.world.rank, 1),
            lambda: box.receive_any(torch.zeros(1), 1, [7]),
            lambda: box.receive_any(torch.zeros(1), 1, []),
            lambda: box.send(torch.zeros(1), 1 - box.world.rank, 2**63),
            lambda: box.send(torch.zeros(4, 4).t(), 1 - box.world.rank, 1),
        ):
            with pytest.raises(BadArgument) as found:
                attempt()
            sentences.append(str(found.value))
        return sentences


def test_strangers_and_tags_and_tensors_that_cannot_be_sent_are_refused() -> None:
    sentences = on_workers(2, _refused)[0]
    assert "worker 0 can exchange messages with [1], not [0]" in sentences[0]
    assert "64 bits" in sentences[3]
    assert "contiguous()" in sentences[4]


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
    while not turns.wanted:
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


# -- those who leave ----------------------------------------------------------------------------------------


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
            board.part()
        return [found[-1][0] - found[0][0], found[-1][1] - found[1][1]]


def test_closed_mailboxes_leave_no_files_and_no_memory() -> None:
    assert on_workers(3, _open_again_and_again) == [[0, 0]] * 3
