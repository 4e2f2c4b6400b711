"""A snapshot that is handed over arrives whole, or not at all."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from workers import on_workers, outcomes

import lockstep
from lockstep.chance import Generators
from lockstep.errors import BadCheckpoint
from lockstep.state.snapshot import Snapshot, pack_generators
from lockstep.state.transfer import SNAPSHOT, help_to_send, helpers_of, pieces, receive_snapshot, send_snapshot
from lockstep.verify.digest import digest
from lockstep.wire.transport import Pending


def odd() -> Snapshot:
    """All kinds of tensors that are easily lost: none of elements, of no dimension, not contiguous, of one byte."""
    key = torch.Generator().manual_seed(0)
    return Snapshot(
        {
            "weights": torch.randn(300, 7, generator=key),
            "turned": torch.randn(5, 9, generator=key).T,
            "counter": torch.tensor(3),
            "nothing": torch.empty(0, 4),
            "flags": torch.tensor([True, False, True]),
            "half": torch.randn(11, generator=key).bfloat16(),
        },
        {"step": 412, "name": "é", "rate": 1e-3},
    )


def snapshot() -> Snapshot:
    """With the state of a run, without which it would not be taken."""
    taken = odd()
    generators = pack_generators(Generators.now(), "generators", taken.tensors)
    state = {"epoch": 0, "num_lanes": 1, "seed": 0, "loss": None, "loaders": [], "optimizers": {}, "tracked": {}}
    return Snapshot(taken.tensors, taken.state | state | {"generators": generators})


def hand_over(piece_bytes: int) -> list[Any]:
    transport = lockstep.start().guard.generation.wire.transport
    if transport.world.rank == 0:
        found = snapshot()
        send_snapshot(transport, found, transport.world.peers, SNAPSHOT, piece_bytes)
    else:
        found = receive_snapshot(transport, 0, SNAPSHOT)
    return [digest(found.tensors), found.state]


@pytest.mark.parametrize("piece_bytes", [7, 1000, 64 * 2**20])
def test_all_targets_receive_the_bits_that_were_sent(piece_bytes: int) -> None:
    first, *others = on_workers(3, hand_over, piece_bytes)
    assert others == [first] * 2


class Counting:
    """A transport that counts the bytes which it sends."""

    def __init__(self, transport: Any) -> None:
        self.world, self.receive, self._transport, self.num_bytes = transport.world, transport.receive, transport, 0

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        self.num_bytes += tensor.numel()
        return self._transport.send(tensor, target, tag)


def hand_over_by_three(piece_bytes: int) -> list[Any]:
    """Workers 0 to 2 have the state. The last has drifted, and lacks one tensor; workers 3 and 4 are given it."""
    transport = Counting(lockstep.start().guard.generation.wire.transport)
    rank, found = transport.world.rank, snapshot()
    if rank == 2:
        found.tensors["weights"][150:, 3] += 1
        del found.tensors["half"]
    if rank == 0:
        send_snapshot(transport, found, [3, 4], SNAPSHOT, piece_bytes, helpers=[1, 2])
    elif rank < 3:
        help_to_send(transport, found, 0)
    else:
        found = receive_snapshot(transport, 0)
    return [digest(found.tensors), found.state, transport.num_bytes]


@pytest.mark.parametrize("piece_bytes", [100, 1000, 64 * 2**20])
def test_several_members_send_and_the_state_is_that_of_the_first(piece_bytes: int) -> None:
    source, helper, _, *targets = on_workers(5, hand_over_by_three, piece_bytes)
    assert [target[:2] for target in targets] == [source[:2]] * 2
    num_bytes = sum(tensor.nbytes for tensor in snapshot().tensors.values())
    in_turn = [sum(span.stop - span.start for span in piece) for piece in pieces([num_bytes], piece_bytes)][1::3]
    assert helper[2] == 2 * sum(in_turn)


@given(st.integers(1, 5000), st.integers(0, 4999))
def test_a_few_members_help_the_source(num_members: int, source: int) -> None:
    source %= num_members
    helpers = helpers_of(source, range(num_members))
    assert source not in helpers
    assert len(set(helpers)) == len(helpers) == min(num_members - 1, 7) or 4 <= len(helpers) <= 7


class Damaging:
    """A transport that flips one bit of message number `which`."""

    def __init__(self, transport: Any, which: int) -> None:
        self.world, self._transport, self._left = transport.world, transport, which

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        if self._left == 0:
            tensor = tensor.clone()
            tensor[tensor.numel() // 2] ^= 1
        self._left -= 1
        return self._transport.send(tensor, target, tag)


def hand_over_damaged(which: int) -> None:
    transport = lockstep.start().guard.generation.wire.transport
    if transport.world.rank == 0:
        send_snapshot(Damaging(transport, which), snapshot(), [1])
    else:
        receive_snapshot(transport, 0)


@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["the head", "the text", "the tensors", "the digest"])
def test_a_bit_that_flips_on_the_way_is_noticed(which: int) -> None:
    _, receiver = outcomes(2, hand_over_damaged, which)
    assert receiver.error == BadCheckpoint.__name__


def hand_over_nonsense(piece_bytes: int) -> None:
    transport = lockstep.start().guard.generation.wire.transport
    if transport.world.rank == 0:
        send_snapshot(transport, odd(), [1], SNAPSHOT, piece_bytes)
    else:
        receive_snapshot(transport, 0)


def test_a_snapshot_that_arrives_whole_and_is_no_state_of_a_run_is_refused_by_name() -> None:
    _, receiver = outcomes(2, hand_over_nonsense, 1000)
    assert (receiver.error, receiver.message) == (
        "BadCheckpoint",
        "the snapshot from worker 0: state/epoch is missing",
    )


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 30))
def test_pieces_hold_every_byte_once_and_in_order(sizes: list[int], piece_bytes: int) -> None:
    cut = list(pieces(sizes, piece_bytes))
    found = [(span.tensor, place) for piece in cut for span in piece for place in range(span.start, span.stop)]
    assert found == [(tensor, place) for tensor, size in enumerate(sizes) for place in range(size)]
    lengths = [sum(span.stop - span.start for span in piece) for piece in cut]
    assert all(length == piece_bytes for length in lengths[:-1])
