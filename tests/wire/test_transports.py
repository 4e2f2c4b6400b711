"""The conformance suite: what every transport must do, run on each, with real processes."""

import os
import signal
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from workers import on_workers, outcomes

from lockstep.errors import PeerGone
from lockstep.lanes import Assignment, present_lanes, reduction
from lockstep.wire import Agreement, Plan, Wire, broadcast, exchange, in_process, over_gloo
from lockstep.wire.algorithms import direct
from lockstep.wire.exchange import exchange_texts
from lockstep.world import World


def open_wire(timeout_s: float = 20.0) -> Wire:
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
    return over_gloo(World(rank, size, rank, size), store, timeout_s)


WORLDS = pytest.mark.parametrize("num_workers", [1, 2, 3, 5])


def _reduce(num_lanes: int, num_samples: int, dtype: str, num_elements: int) -> list[float]:
    with open_wire() as wire:
        rank = wire.world.rank
        whole = reduction(Assignment.even(num_lanes, wire.world.size), present_lanes(num_samples, num_lanes))
        total = torch.zeros(num_elements, dtype=getattr(torch, dtype))
        roots = [total.clone() for _ in range(whole.roots_of[rank])]
        for index, root in enumerate(roots):
            root.copy_(torch.arange(num_elements) % 7 + 10 * rank + index)
        wire.executor.reduce(direct(whole), roots, total)
        return total.double().tolist()


def _expected(num_workers: int, num_lanes: int, num_samples: int, num_elements: int) -> list[float]:
    whole = reduction(Assignment.even(num_lanes, num_workers), present_lanes(num_samples, num_lanes))
    base = sum(10 * rank + index for rank, count in enumerate(whole.roots_of) for index in range(count))
    return [float(base + (element % 7) * sum(whole.roots_of)) for element in range(num_elements)]


@WORLDS
@pytest.mark.parametrize("num_elements", [1, 2, 1000])
def test_a_reduction_leaves_the_same_sum_everywhere(num_workers: int, num_elements: int) -> None:
    found = on_workers(num_workers, _reduce, 8, 52, "float32", num_elements)
    assert found == [_expected(num_workers, 8, 52, num_elements)] * num_workers


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "complex64"])
def test_a_reduction_works_in_every_dtype_of_gradients(dtype: str) -> None:
    found = on_workers(3, _reduce_real, dtype)
    assert found == [[9.0, 9.0, 9.0]] * 3


def _reduce_real(dtype: str) -> list[float]:
    with open_wire() as wire:
        whole = reduction(Assignment.even(3, 3), (0, 1, 2))
        root = torch.full((3,), float(wire.world.rank + 2), dtype=getattr(torch, dtype))
        wire.executor.reduce(direct(whole), [root], root)
        return root.real.double().tolist() if root.is_complex() else root.double().tolist()


def _talk() -> list[Any]:
    with open_wire() as wire:
        rank = wire.world.rank
        records = exchange(wire.transport, torch.tensor([rank, 7], dtype=torch.uint8))
        texts = exchange_texts(wire.transport, "ü" * (rank + 1))
        flat = torch.full((5,), float(rank))
        broadcast(wire.transport, flat, source=wire.world.size - 1)
        return [[record.tolist() for record in records], texts, flat.tolist()]


@WORLDS
def test_everyone_hears_everyone_in_rank_order(num_workers: int) -> None:
    ranks = range(num_workers)
    expected = [[[r, 7] for r in ranks], ["ü" * (r + 1) for r in ranks], [float(num_workers - 1)] * 5]
    assert on_workers(num_workers, _talk) == [expected] * num_workers


def _in_order() -> list[int]:
    with open_wire() as wire:
        peer = 1 - wire.world.rank
        places = [torch.zeros(1) for _ in range(50)]
        pending = [wire.transport.receive(place, peer, 4) for place in places]
        pending += [wire.transport.send(torch.full((1,), float(n)), peer, 4) for n in range(50)]
        for transfer in pending:
            transfer.wait()
        return [int(place) for place in places]


def test_messages_with_one_tag_arrive_in_the_order_they_were_sent() -> None:
    assert on_workers(2, _in_order) == [list(range(50))] * 2


def _agree(samples_of: list[int]) -> None:
    with open_wire() as wire:
        Agreement(wire.transport, Plan({"operation": "step", "samples": samples_of[wire.world.rank]})).check()


def test_a_disagreement_is_named_on_every_worker() -> None:
    found = outcomes(3, _agree, [52, 52, 51])
    assert [outcome.error for outcome in found] == ["Disagreement"] * 3
    assert "samples: worker 0 has 52, worker 2 has 51" in found[0].message
    assert "samples: worker 2 has 51, worker 0 has 52" in found[2].message


def test_agreement_passes_in_silence() -> None:
    assert on_workers(3, _agree, [52, 52, 52]) == [None] * 3


def _lose_a_peer() -> list[Any]:
    with open_wire() as wire:
        exchange(wire.transport, torch.zeros(1, dtype=torch.uint8))
        if wire.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerGone) as gone:
            exchange(wire.transport, torch.zeros(1, dtype=torch.uint8))
        return [gone.value.rank]


def test_a_killed_peer_is_named_by_the_survivors() -> None:
    found = outcomes(3, _lose_a_peer)
    assert [found[0].value, found[2].value] == [[1], [1]]
    assert found[1].killed_by == signal.SIGKILL


def _close_while_waiting() -> str:
    wire = open_wire()
    if wire.world.rank == 0:
        waiting = wire.sequence.submit(lambda: wire.transport.receive(torch.zeros(1), 1, 9).wait())
        wire.close()
        return type(waiting.exception(timeout=10)).__name__
    exchange_done = wire.transport.send(torch.zeros(1), 0, 5)
    del exchange_done
    wire.close()
    return "closed"


def test_closing_ends_a_wait_on_another_thread() -> None:
    assert on_workers(2, _close_while_waiting)[0] == "PeerGone"


def _addresses() -> list[str]:
    with open_wire():
        connections = psutil.Process().net_connections(kind="inet")
        return sorted({c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN})


def test_on_one_host_nothing_listens_outside_of_loopback() -> None:
    for found in on_workers(2, _addresses):
        assert set(found) <= {"127.0.0.1"}
