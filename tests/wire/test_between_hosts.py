"""Workers on several hosts: real network stacks, joined by a real (if small) network."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from hosts import INTERFACE, PORT, address, existing, hosts
from training import Job, digest_after, loader_of, make, train_step
from workers import on_workers

import lockstep
from lockstep.elastic.rendezvous import open_store
from lockstep.lanes import Assignment, reduction
from lockstep.run import active
from lockstep.settings.environment import find_place
from lockstep.wire.network.gloo import GlooTransport
from lockstep.wire.schedules.executor import Executor

WIRES = pytest.mark.parametrize("wire", ["gloo", "hierarchical"])
JOB = Job(epochs=1)


@pytest.fixture(autouse=True)
def no_namespace_left() -> Iterator[None]:
    yield
    assert existing(f"lockstep-{os.getpid()}-") == []


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """Digest and number of steps of the same training on one worker."""
    found: list[Any] = on_workers(1, digest_after, JOB)[0]
    return found


@WIRES
@pytest.mark.parametrize("workers_of", [[2, 2], [1, 2, 1]], ids=str)
def test_training_on_several_hosts_has_the_bits_of_one_worker(
    wire: str, workers_of: list[int], alone: list[Any]
) -> None:
    with hosts(workers_of) as network:
        assert network.on_workers(digest_after, JOB, wire=wire) == [alone] * 4


def test_gradients_in_half_the_bytes_have_the_same_bits_on_one_worker_and_on_two_hosts() -> None:
    (alone,) = on_workers(1, digest_after, JOB, reduce_dtype="bfloat16")
    with hosts([2, 1]) as network:
        assert network.on_workers(digest_after, JOB, reduce_dtype="bfloat16") == [alone] * 3


def _held_once(reduce_dtype: str | None) -> tuple[list[Any], list[str]]:
    """Digest and number of steps, and the kinds of buckets that there were."""
    found = digest_after(JOB, wire="hierarchical", strategy="sharded:parameters", reduce_dtype=reduce_dtype)
    run: Any = active.current()
    return found, sorted({type(bucket).__name__ for bucket in run._engine._buckets.buckets})


@pytest.mark.parametrize("workers_of", [[2, 1], pytest.param([1, 3, 2], marks=pytest.mark.soak)], ids=str)
@pytest.mark.parametrize("reduce_dtype", [None, "bfloat16"])
def test_gradients_that_stand_once_on_each_host_have_the_bits_of_one_worker(
    workers_of: list[int], reduce_dtype: str | None
) -> None:
    """On the smaller host a worker writes the columns of several."""
    (alone,) = on_workers(1, digest_after, JOB, reduce_dtype=reduce_dtype)
    with hosts(workers_of) as network:
        assert network.on_workers(_held_once, reduce_dtype) == [[alone, ["OnceBucket"]]] * sum(workers_of)


def _endpoints(wire: str) -> list[list[Any]]:
    """Where this worker's connections begin and end."""
    lockstep.start(lanes=4, wire=wire)
    connections = psutil.Process().net_connections(kind="tcp")
    ends = [(c.laddr, c.raddr) for c in connections if c.status == psutil.CONN_ESTABLISHED]
    return [[_plain(here.ip), here.port, _plain(there.ip), there.port] for here, there in ends]


def _plain(ip: str) -> str:
    """The store's sockets speak IPv6 to IPv4 addresses."""
    return ip.removeprefix("::ffff:")


@WIRES
def test_store_and_data_go_through_the_interface_that_was_named(wire: str) -> None:
    with hosts([1, 1, 1]) as network:
        for host, found in enumerate(network.on_workers(_endpoints, wire)):
            here, there = {end[0] for end in found}, {end[2] for end in found}
            assert here == {address(host)}
            assert there >= set(network.addresses) - {address(host)}
            assert PORT in {end[1] for end in found} | {end[3] for end in found}


def _lose_a_worker(wire: str) -> None:
    run = lockstep.start(lanes=8, seed=3, wire=wire, timeout_s=20.0, recover=False)
    model, optimizer = make(JOB)
    run.replicate(model, optimizer)
    for batch in run.shard(loader_of(JOB)):
        if run.rank == 3 and run.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(run, JOB, model, optimizer, batch)


@WIRES
def test_a_worker_killed_on_another_host_is_named_with_its_step(wire: str) -> None:
    with hosts([2, 2]) as network:
        found = network.outcomes(_lose_a_worker, wire)
    assert found[3].killed_by == signal.SIGKILL
    for outcome in found[:3]:
        assert outcome.error == "WorkerLost"
        assert outcome.message.startswith("worker 3 was lost during")
        assert "step 2" in outcome.message


def _reduce(num_elements: int, segment_bytes: int) -> list[float]:
    place = find_place(os.environ)
    transport = GlooTransport(place.world, open_store(place, 20.0), 20.0)
    size, rank = place.world.size, place.world.rank
    value = torch.full((num_elements,), float(rank + 1))
    whole = reduction(Assignment.even(size, size), tuple(range(size)))
    Executor(transport, segment_bytes=segment_bytes).reduce(whole, [value], value)
    transport.close()
    return sorted(set(value.tolist()))


def test_a_reduction_over_a_narrow_network_waits_for_it_and_is_right() -> None:
    with hosts([1, 1], mbit_per_s=100, delay_ms=1.0) as network:
        assert network.on_workers(_reduce, 250_000, 65_536) == [[3.0], [3.0]]
        counted = network.traffic(0)
    assert counted["kind"] == "tbf"
    assert counted["overlimits"] > 0, "the limit was never reached"
    assert 1_000_000 < counted["bytes"] < 1_500_000, "half of the bucket each way, twice"


def test_an_interface_that_is_not_there_is_told_with_the_variable_to_set() -> None:
    with hosts([1, 1]) as network:
        found = network.outcomes(digest_after, JOB, interface="nowhere0", timeout_s=2.0)
    assert found[0].error == "BadEnvironment"
    assert "set GLOO_SOCKET_IFNAME" in found[0].message


def test_shared_memory_between_hosts_is_refused() -> None:
    with hosts([1, 1]) as network:
        found = network.outcomes(digest_after, JOB, wire="shared", timeout_s=5.0)
    assert [outcome.error for outcome in found] == ["BadArgument"] * 2
    assert active.current() is None


# -- the hosts themselves --------------------------------------------------------------------------------------


def test_hosts_are_gone_after_an_interrupted_test() -> None:
    with pytest.raises(KeyboardInterrupt), hosts([1, 1]) as network:
        assert existing(network.namespaces[0]) != []
        raise KeyboardInterrupt
    assert existing(f"lockstep-{os.getpid()}-") == []


def test_hosts_of_a_killed_test_run_are_removed_by_the_next() -> None:
    with hosts([1]):  # skips where namespaces cannot be made
        pass
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = f"lockstep-{gone.pid}-0-host0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with hosts([1]):
        assert existing(left) == []


def test_the_interface_of_a_host_is_not_seen_outside() -> None:
    with hosts([1]):
        assert INTERFACE not in psutil.net_if_addrs()
