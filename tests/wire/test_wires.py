"""Whole wires, with real processes: what happens on each when workers wait, die, close or disagree, and what it holds.

What transports and reducers do is in test_transport_conformance.py and test_reducer_conformance.py.
"""

import hashlib
import os
import resource
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from workers import on_workers, outcomes

from lockstep.errors import PeerGone
from lockstep.lanes import Assignment, reduction
from lockstep.wire import (
    Agreement,
    Proposal,
    Wire,
    exchange,
    in_process,
    in_shared_memory,
    over_gloo,
    over_hosts,
)
from lockstep.wire.exchange import RoutedExchange, post
from lockstep.wire.network.deadline import Deadline
from lockstep.wire.shared.neighbours import SECRET_BYTES
from lockstep.wire.transport import COMMIT, CONTROL, each_alone
from lockstep.world import World


def open_wire(kind: str = "gloo", timeout_s: float = 20.0) -> Wire:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        return in_process()
    port = int(os.environ["MASTER_PORT"])
    listen = {"master_listen_fd": int(os.environ["LOCKSTEP_LISTEN_FD"])} if rank == 0 else {}
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        size,
        rank == 0,
        timedelta(seconds=20),
        wait_for_workers=False,
        multi_tenant=False,
        **listen,
    )
    world = World(rank, size, rank, size)
    if kind == "hierarchical":  # as if on two hosts: the last worker alone
        return over_hosts(world, store, timeout_s, hosts=(tuple(range(size - 1)), (size - 1,)))
    if kind == "shared":
        return in_shared_memory(world, store, timeout_s)
    return over_gloo(world, store, timeout_s, exact=kind != "gloo native")


WIRES = pytest.mark.parametrize("kind", ["gloo", "shared", "hierarchical"])


def _flat(wire: Wire, num_elements: int, allocated: bool) -> torch.Tensor:
    """Memory that the wire gave, or any."""
    if allocated:
        return wire.reducer.allocate(num_elements, torch.float32, torch.device("cpu"))
    return torch.empty(num_elements)


def _exchange_all(kind: str) -> list[Any]:
    """Two exchanges at once, as a step has; the second is waited for first. Then one whose records differ in no bit."""
    with open_wire(kind) as wire:
        rank, transport = wire.world.rank, wire.transport
        one = post(transport, torch.tensor([rank, 7, rank], dtype=torch.uint8), CONTROL)
        two = post(transport, torch.tensor([100 + rank], dtype=torch.uint8), COMMIT)
        second = [record.tolist() for record in two.wait()]
        first = [record.tolist() for record in one.wait()]
        exchange(transport, torch.zeros(1, dtype=torch.uint8))
        return [first, second]


@WIRES
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("most_direct", [1, 16])
def test_every_worker_has_every_record_by_rank_directly_and_in_rounds(
    kind: str, size: int, most_direct: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["lockstep.wire.exchange"], "MOST_DIRECT", most_direct)
    records = [[[rank, 7, rank] for rank in range(size)], [[100 + rank] for rank in range(size)]]
    assert on_workers(size, _exchange_all, kind) == [records] * size


@given(st.integers(2, 40))
def test_in_rounds_a_worker_sends_and_receives_a_logarithm_of_messages(size: int) -> None:
    messages: list[tuple[str, int, int]] = []

    class Counted:
        world, hosts = World(size // 2, size, size // 2, size), each_alone(size)

        def send(self, tensor: torch.Tensor, target: int, tag: int) -> "Counted":
            messages.append(("to", target, tensor.numel()))
            return self

        def receive(self, tensor: torch.Tensor, source: int, tag: int) -> "Counted":
            messages.append(("from", source, tensor.numel()))
            return self

        def wait(self) -> None:
            pass

    RoutedExchange(cast(Any, Counted()), torch.zeros(3, dtype=torch.uint8), CONTROL).wait()
    for way in ("to", "from"):
        sizes = {peer: number for side, peer, number in messages if side == way}
        assert len(sizes) == (size - 1).bit_length() == len([1 for side, *_ in messages if side == way])
        assert sum(sizes.values()) == 3 * (size - 1)


def _threads_of_gloo() -> list[str]:
    with open_wire("gloo"):
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("lockstep"))


def test_more_peers_need_no_more_threads() -> None:
    (two,), (five,) = ({tuple(names) for names in on_workers(size, _threads_of_gloo)} for size in (2, 5))
    assert two == five


GO_AHEAD, WAITED_FOR = 6, 7


def _wait_for(kind: str) -> list[Any]:
    """Worker 0 waits, on a thread of its own, for worker 1, which waits for its message: whom does worker 0 await?"""
    with open_wire(kind) as wire:
        rank, before = wire.world.rank, wire.awaited()
        if rank == 1:
            wire.transport.receive(torch.zeros(1), 0, GO_AHEAD).wait()
        if rank > 0:
            _take_part(wire)
            return [before, wire.awaited()]
        waiting = threading.Thread(target=_take_part, args=(wire,))
        waiting.start()
        Deadline(20.0).until(lambda: 1 in wire.awaited())
        Deadline(20.0).until(lambda: wire.awaited() == [1])  # the others have come by now
        wire.transport.send(torch.zeros(1), 1, GO_AHEAD).wait()
        waiting.join()
        return [before, wire.awaited()]


def _take_part(wire: Wire) -> None:
    whole = reduction(Assignment.even(wire.world.size, wire.world.size), tuple(range(wire.world.size)))
    root = torch.ones(1000)
    wire.reducer.reduce(whole, [root], root)


@WIRES
def test_a_worker_names_those_for_whom_it_waits_in_a_reduction(kind: str) -> None:
    assert on_workers(3, _wait_for, kind) == [[[], []]] * 3


def _lose_it_while_waiting(kind: str) -> list[Any]:
    with open_wire(kind) as wire:
        if wire.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerGone):
            wire.transport.receive(torch.zeros(1), 1, WAITED_FOR).wait()
        failed = wire.awaited()
    return [failed, wire.awaited()]


@WIRES
def test_nobody_is_awaited_after_a_loss_or_a_close(kind: str) -> None:
    found = outcomes(3, _lose_it_while_waiting, kind)
    assert [found[0].value, found[2].value] == [[[], []]] * 2


def _agree(samples_of: list[int]) -> None:
    with open_wire() as wire:
        Agreement(wire.transport, Proposal({"operation": "step", "samples": samples_of[wire.world.rank]})).check()


def test_a_disagreement_is_named_on_every_worker() -> None:
    found = outcomes(3, _agree, [52, 52, 51])
    assert [outcome.error for outcome in found] == ["Disagreement"] * 3
    assert "samples: worker 0 has 52, worker 2 has 51" in found[0].message
    assert "samples: worker 2 has 51, worker 0 has 52" in found[2].message


def test_agreement_passes_in_silence() -> None:
    assert on_workers(3, _agree, [52, 52, 52]) == [None] * 3


def _random_sums(kind: str) -> str:
    """Many reductions of random numbers over random assignments; more elements than a piece holds."""
    with open_wire(kind) as wire:
        chance = torch.Generator().manual_seed(0)
        sums = hashlib.sha256()
        for size in (3, 70_001, 200_000):
            carrier = torch.randint(0, wire.world.size, (9,), generator=chance).tolist()
            assignment = Assignment.explicit([v for v in range(9) if carrier[v] == r] for r in range(wire.world.size))
            whole = reduction(assignment, tuple(range(9)))
            lanes = torch.randn(9, size, generator=chance)
            fold = whole.folds[wire.world.rank]
            stack: list[torch.Tensor] = []
            for lane, merges in zip(fold.lanes, fold.merges, strict=True):
                stack.append(_flat(wire, size, allocated=True).copy_(lanes[lane]))
                for _ in range(merges):
                    top = stack.pop()
                    stack[-1].add_(top)
            total = stack[0] if stack else _flat(wire, size, allocated=True)
            wire.reducer.reduce(whole, stack, total)
            sums.update(bytes(total.view(torch.uint8).tolist()))
        return sums.hexdigest()


@WIRES
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_any_assignment_on_any_wire_gives_the_bits_of_one_worker(kind: str, num_workers: int) -> None:
    (alone,) = on_workers(1, _random_sums, kind)
    assert on_workers(num_workers, _random_sums, kind) == [alone] * num_workers


def _lose_a_peer_in_a_reduction(kind: str, both_noticed: Barrier) -> list[Any]:
    with open_wire(kind) as wire:
        whole = reduction(Assignment.even(3, 3), (0, 1, 2))
        root = _flat(wire, 100_000, allocated=True)
        wire.reducer.reduce(whole, [root], root)
        if wire.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerGone) as gone:
            wire.reducer.reduce(whole, [root], root)
        if kind != "hierarchical":  # there the other host learns of it from whoever leaves because of it
            both_noticed.wait(20)  # who leaves is lost to the other
        return [gone.value.rank]


@WIRES
def test_a_peer_killed_during_a_reduction_is_named_by_the_survivors(kind: str) -> None:
    found = outcomes(3, _lose_a_peer_in_a_reduction, kind, get_context("fork").Barrier(2))
    assert [found[0].value, found[2].value] == [[1], [1]]


def _lose_a_peer_with_a_child(both_noticed: Barrier) -> list[Any]:
    with open_wire("shared", timeout_s=15.0) as wire:
        whole = reduction(Assignment.even(3, 3), (0, 1, 2))
        root = _flat(wire, 100, allocated=True)
        wire.reducer.reduce(whole, [root], root)
        if wire.world.rank == 1:
            if os.fork() == 0:  # as a DataLoader forks its processes, with all open files
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerGone) as gone:
            wire.reducer.reduce(whole, [root], root)
        both_noticed.wait(20)
        return [gone.value.rank, gone.value.cause]


def test_a_killed_peer_is_noticed_although_its_children_live_on() -> None:
    found = outcomes(3, _lose_a_peer_with_a_child, get_context("fork").Barrier(2))
    for rank in (0, 2):
        assert found[rank].value[0] == 1
        assert "silent" not in found[rank].value[1]


def _many_roots() -> list[float]:
    """Lanes dealt out in turn, so that no two of a worker's are neighbours: more roots than one message takes files."""
    with open_wire("shared") as wire:
        assignment = Assignment.explicit([range(rank, 520, 2) for rank in range(2)])
        whole = reduction(assignment, tuple(range(520)))
        roots = [_flat(wire, 3, allocated=True).fill_(lane) for lane in assignment.lanes_of[wire.world.rank]]
        wire.reducer.reduce(whole, roots, roots[0])
        return roots[0].tolist()


def test_more_roots_than_fit_a_message_are_added_too() -> None:
    assert on_workers(2, _many_roots) == [[float(sum(range(520)))] * 3] * 2


def _hold_after_reductions() -> list[int]:
    """How many files are open, and how much memory of peers is mapped, after layouts came and went."""
    with open_wire("shared") as wire:
        whole = reduction(Assignment.even(2, 2), (0, 1))
        counts = []
        for _ in range(5):
            root = _flat(wire, 300_000, allocated=True)
            wire.reducer.reduce(whole, [root], root)
            wire.reducer.release(root)
            del root
            counts.append(len(os.listdir("/proc/self/fd")))
        mapped = Path("/proc/self/maps").read_text().count("memfd:lockstep")
        return [counts[-1] - counts[0], mapped]


def test_released_memory_is_given_back_by_all_workers() -> None:
    for more_files, mapped in on_workers(2, _hold_after_reductions):
        assert more_files <= 0
        # The board, the page of accusations, two mailboxes; and the last one, here and at the peer, until the next.
        assert mapped <= 6


def _too_much() -> None:
    with open_wire("shared") as wire:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        wire.reducer.allocate(2**20, torch.float32, torch.device("cpu"))


def test_memory_that_cannot_be_had_is_an_error_and_not_a_bus_error() -> None:
    found = outcomes(2, _too_much)
    assert [outcome.error for outcome in found] == ["BadEnvironment"] * 2
    assert "4 MiB of shared memory cannot be had" in found[0].message


def _close_while_waiting(kind: str) -> str:
    wire = open_wire(kind)
    if wire.world.rank == 0:
        root = _flat(wire, 10, allocated=True)
        whole = reduction(Assignment.even(2, 2), (0, 1))
        waiting = wire.sequence.submit(lambda: wire.reducer.reduce(whole, [root], root))
        wire.close()
        return type(waiting.exception(timeout=60)).__name__
    wire.close()
    return "closed"


@WIRES
def test_closing_ends_a_wait_on_another_thread(kind: str) -> None:
    assert on_workers(2, _close_while_waiting, kind)[0] == "PeerGone"


def _addresses(kind: str) -> list[str]:
    with open_wire(kind):
        connections = psutil.Process().net_connections(kind="inet")
        return sorted({c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN})


@WIRES
def test_on_one_host_nothing_listens_outside_of_loopback(kind: str) -> None:
    for found in on_workers(2, _addresses, kind):
        assert set(found) <= {"127.0.0.1"}


def _reduce_different_things(what: str) -> None:
    with open_wire("shared") as wire:
        whole = reduction(Assignment.even(2, 2), (0, 1))
        odd_one = wire.world.rank == 1
        size = 9 if odd_one and what == "size" else 8
        dtype = torch.int32 if odd_one and what == "dtype" else torch.float32
        value = wire.reducer.allocate(size, dtype, torch.device("cpu")).zero_()
        wire.reducer.reduce(whole, [value], value)


@pytest.mark.parametrize(("what", "named"), [("size", "36 bytes of float32"), ("dtype", "32 bytes of int32")])
def test_different_buckets_are_refused_by_all_with_the_difference(what: str, named: str) -> None:
    found = outcomes(2, _reduce_different_things, what)
    assert [outcome.error for outcome in found] == ["Disagreement"] * 2
    assert all(named in outcome.message and "32 bytes of float32" in outcome.message for outcome in found)


def _open_memory_files() -> int:
    """Open files of shared memory: the store's thread opens and closes connections when it likes."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            count += "memfd:lockstep" in os.readlink(f"/proc/self/fd/{name}")
    return count


def _open_many_buckets() -> int:
    """How many more files are open with a hundred buckets, here and at the peer, than with none."""
    with open_wire("shared") as wire:
        whole = reduction(Assignment.even(2, 2), (0, 1))
        before = _open_memory_files()
        buckets = [_flat(wire, 10, allocated=True) for _ in range(100)]
        for bucket in buckets:
            wire.reducer.reduce(whole, [bucket], bucket)
        return _open_memory_files() - before


def test_shared_buckets_keep_no_open_files() -> None:
    assert on_workers(2, _open_many_buckets) == [0, 0]


def _memory_of_a_lone_worker() -> list[int]:
    """How often shared memory is mapped after buckets came and went; the last worker is alone on its host."""
    with open_wire("hierarchical") as wire:
        whole = reduction(Assignment.even(3, 3), (0, 1, 2))
        counts = []
        for _ in range(4):
            bucket = _flat(wire, 1000, allocated=True)
            wire.reducer.reduce(whole, [bucket], bucket)
            wire.reducer.release(bucket)
            del bucket
            counts.append(Path("/proc/self/maps").read_text().count("memfd:lockstep"))
        return counts


def test_a_worker_alone_on_its_host_gives_back_released_memory_too() -> None:
    for counts in on_workers(3, _memory_of_a_lone_worker):
        assert counts[-1] <= counts[0]


def _leave_a_meeting_early() -> str:
    """Worker 1 fails before the closing barrier, and meets again: the two are at different points for good."""
    with open_wire("shared", timeout_s=1.0) as wire:
        bucket = _flat(wire, 10, allocated=True)
        board = wire.reducer.board
        board.meet(b"", [bucket])
        if wire.world.rank == 1:
            board.meet(b"", [bucket])
        else:
            board.closing_barrier()
    return "went on"


def test_workers_at_different_points_of_a_meeting_give_up_after_the_timeout() -> None:
    assert [outcome.error for outcome in outcomes(2, _leave_a_meeting_early)] == ["PeerGone"] * 2


def _call_uninvited() -> list[bool]:
    """While worker 0 waits for worker 1, a process of the same user calls at its address without the secret."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        port = int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore("lockstep/shared/0", dist.TCPStore("127.0.0.1", port, None, False))
        name = bytes(store.get("neighbour/0"))[SECRET_BYTES:]
        for said in (b"", b"x", bytes(SECRET_BYTES) + struct.pack("i", 1)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(name)
                stranger.send(said)
    with open_wire("shared") as wire:
        return [bool(torch.equal(record, torch.tensor([7], dtype=torch.uint8))) for record in _sevens(wire)]


def _sevens(wire: Wire) -> list[torch.Tensor]:
    return exchange(wire.transport, torch.tensor([7], dtype=torch.uint8))


def test_a_process_without_the_secret_is_turned_away() -> None:
    assert on_workers(2, _call_uninvited) == [[True, True]] * 2
