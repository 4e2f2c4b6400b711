"""Messages through shared memory between real workers of one host: what arrives, and when."""

import random
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
from boxes import LONG, RING_BYTES, barrier, content, open_box
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import on_workers

from lockstep.errors import BadArgument, Disagreement
from lockstep.wire.exchange import broadcast, exchange, exchange_texts
from lockstep.wire.shared import semaphores
from lockstep.wire.shared.channel import (
    INBOUND_BYTES,
    MAX_SLOT_BYTES,
    NUM_SLOTS,
    ChannelLayout,
    Chunk,
    Inbound,
    Outbound,
)
from lockstep.wire.shared.transfers import Line, Matching, Receiving, Sending

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
    layout = ChannelLayout(num_peers)
    small = layout.slot_bytes == 4096  # thousands of workers: slots are not made smaller than a page
    assert layout.segment_bytes <= 1.05 * INBOUND_BYTES + 1024 or small
    assert layout.segment_bytes >= 0.9 * INBOUND_BYTES or layout.slot_bytes == MAX_SLOT_BYTES


@given(st.lists(st.booleans(), max_size=40))
def test_a_sender_that_found_no_free_slot_is_rung_although_its_chunks_did_not_ask(puts: list[bool]) -> None:
    """Both ends of a channel in this process, which put and take in any order."""
    layout = ChannelLayout(1)
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
