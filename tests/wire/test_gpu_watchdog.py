"""Who wakes a worker that waits for its GPU. The GPU is played by an event that only `free` sets; all else is real."""

import os
import signal
import threading
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from workers import outcomes

from lockstep.elastic.rendezvous import open_store
from lockstep.errors import PeerGone
from lockstep.settings.environment import find_place, process_environment
from lockstep.wire.cuda.gpu import GpuWatchdog
from lockstep.wire.shared.neighbours import connect

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
    told = [outcome.value for outcome in outcomes(3, wait_for_a_peer, "silent", 1.0)]
    assert [told[rank]["rank"] for rank in (0, 2)] == [1, 1]
    # Whoever noticed first has left since: the others saw that, and whom it accused.
    assert "its GPU has been silent for 1 s" in [value["cause"] for value in told]
