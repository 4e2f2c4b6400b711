"""Who wakes a worker that waits for its GPU. The GPU is played by an event that only `free` sets; all else is real."""

import os
import signal
import threading
from contextlib import closing
from typing import Any

import pytest
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from workers import outcomes

from lockstep.elastic.rendezvous import open_store
from lockstep.errors import PeerGone
from lockstep.settings.environment import find_place, process_environment
from lockstep.wire.cuda.gpu import GpuWatchdog, RemotePeers
from lockstep.wire.shared.neighbours import connect
from lockstep.world import World

ENDED = "its process has ended"


class StuckGpu:
    """A GPU that waits for a peer until it is freed."""

    def __init__(self) -> None:
        self._freed = threading.Event()

    def free(self) -> None:
        self._freed.set()

    def synchronize(self) -> None:
        assert self._freed.wait(30), "nobody freed the GPU"


def wait_for_a_peer(what_becomes_of_1: str, timeout_s: float) -> dict[str, Any]:
    place = find_place(process_environment())
    store = PrefixStore("watchdog", open_store(place, 20.0))
    neighbours = connect(place.world, range(place.world.size), store, timeout_s)
    gpu = StuckGpu()
    watchdog = GpuWatchdog(neighbours, gpu.free, lambda: [1])
    if place.world.rank == 1 and what_becomes_of_1 == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        watchdog.wait(gpu)
    except PeerGone as gone:
        return {"rank": gone.rank, "cause": gone.cause}
    finally:
        neighbours.close()
        watchdog.close()
    return {}


def test_a_worker_that_died_is_named_to_those_who_wait_for_their_gpu() -> None:
    first, killed, third = outcomes(3, wait_for_a_peer, "killed", 20.0)
    assert killed.killed_by == signal.SIGKILL
    for outcome in (first, third):
        assert outcome.value["rank"] == 1
        assert ENDED in outcome.value["cause"]


def test_a_worker_whose_gpu_is_silent_for_too_long_is_named_by_all() -> None:
    result = [outcome.value for outcome in outcomes(3, wait_for_a_peer, "silent", 1.0)]
    assert [result[rank]["rank"] for rank in (0, 2)] == [1, 1]
    # Whoever noticed first has left since: the others saw that, and whom it accused.
    assert "its GPU has been silent for 1 s" in [value["cause"] for value in result]


def test_between_hosts_the_one_that_a_connection_reports_lost_is_named() -> None:
    gpu, peers = StuckGpu(), RemotePeers(World(0, 3), timeout_s=20.0)
    with (
        closing(GpuWatchdog(peers, gpu.free, list)) as watchdog,
        pytest.raises(PeerGone, match="connection closed by peer") as gone,
    ):
        peers.report(PeerGone(2, "connection closed by peer"))
        peers.report(PeerGone(1, "it left because of that"))
        watchdog.wait(gpu)
    assert gone.value.rank == 2


def test_between_hosts_a_gpu_is_not_waited_for_longer_than_the_limit() -> None:
    gpu, peers = StuckGpu(), RemotePeers(World(0, 3), timeout_s=0.2)
    with closing(GpuWatchdog(peers, gpu.free, list)) as watchdog, pytest.raises(PeerGone) as gone:
        watchdog.wait(gpu)
    assert "has not ended for 0.2 s: it or another one of workers 1, 2 is silent" in str(gone.value)
