"""The GPU of a worker: its current stream, the waits for it, and the watchdog that ends them when a peer is gone.

# Note [Waits for a GPU]
# A host that waits for its own GPU cannot watch its peers, and if one has died the GPU may wait for ever. So a thread
# of its own sleeps on the sockets to the neighbours. When one hangs up, or this worker has waited for longer than the
# limit, the thread frees the waits of the GPU; the worker that waited wakes up, and raises PeerGone instead of using
# the sum. Between hosts the thread sleeps until the watchers of Gloo's connections report a loss.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from lockstep.errors import BadArgument, PeerGone
from lockstep.wire.shared.neighbours import ENDED
from lockstep.world import World

LOOK_S = 0.5
FREE_AGAIN_S = 0.02
NAMING_S = 2.0
"""How long it may take after a collective has failed until the connections say who is gone."""
WAKE_S = 0.1
"""How long a watchdog between hosts may take to see that it is closed."""


class Gpu:
    """One GPU, as the calling thread uses it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def mark(self) -> torch.cuda.Event:
        """An event behind all that is in the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def finish(self) -> None:
        """Returns when the GPU has done all work of this process."""
        torch.cuda.synchronize(self.device)


def refuse_another_gpu(device: torch.device, own: torch.device) -> None:
    """A worker adds on its own GPU."""
    if device.index is not None and own.index is not None and device.index != own.index:
        raise BadArgument(
            f"a parameter is on {device} and this worker's GPU is {own}: between several workers, all that is trained "
            "must be on run.device. A model that is spread over GPUs can be trained on one worker."
        )


class StreamEvent(Protocol):
    """A point in a stream of the GPU."""

    def synchronize(self) -> None:
        """Returns when the GPU has reached it."""


class GpuWait:
    """The waits of this worker for its GPU. `free` ends what the GPU waits for."""

    def __init__(self, free: Callable[[], None]) -> None:
        self._free = free
        self.failure: PeerGone | None = None
        """Who is gone, once that is known."""
        self._is_known = threading.Event()
        self._since_s: float | None = None

    def wait(self, event: StreamEvent) -> None:
        """Returns when the GPU has reached `event`; raises PeerGone if a peer is gone, or silent for too long."""
        self._since_s = time.monotonic()
        event.synchronize()
        self._since_s = None
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: PeerGone) -> None:
        """Every wait, now or later, raises this. Any thread."""
        self.failure = self.failure or failure
        self._is_known.set()
        self._free()

    def named(self, gone: PeerGone) -> PeerGone:
        """The error for a loss that a collective noticed first: which worker it was is known a moment later."""
        self._is_known.wait(NAMING_S)
        return self.failure or gone

    def has_waited_s(self) -> float:
        """For how long the wait under way has lasted; 0 if there is none."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def close(self) -> None:
        """May be called only when no wait is under way, or will be."""


class WatchedPeers(Protocol):
    """The other workers, as a watchdog sees them: `Neighbours` on one host, `RemotePeers` between hosts."""

    timeout_s: float
    closed: bool
    """Whether the connections to them were closed here."""

    @property
    def peers(self) -> tuple[int, ...]: ...

    def gone(self) -> list[int]:
        """Those that are known to be gone."""

    def await_gone(self, limit_s: float) -> list[int]:
        """The same as soon as there are any, or after `limit_s`, or earlier."""

    def accusers(self) -> list[int]:
        """Those that leave because of another one that is gone."""

    def blame(self, peer: int, cause: str) -> PeerGone:
        """The error for a peer that is gone: it names the one that was gone first."""


class RemotePeers:
    """The workers of several hosts: the watchers of the connections between them call `report`."""

    closed = False

    def __init__(self, world: World, timeout_s: float) -> None:
        self.peers, self.timeout_s = world.peers, timeout_s
        self._lost: PeerGone | None = None
        self._news = threading.Event()

    def report(self, gone: PeerGone) -> None:
        """Any thread; the first report counts."""
        self._lost = self._lost or gone
        self._news.set()

    def gone(self) -> list[int]:
        return [] if self._lost is None else [self._lost.rank]

    def await_gone(self, limit_s: float) -> list[int]:
        self._news.wait(min(limit_s, WAKE_S))
        return self.gone()

    def accusers(self) -> list[int]:
        return []

    def blame(self, peer: int, cause: str) -> PeerGone:
        return self._lost or PeerGone(peer, cause)


class GpuWatchdog(GpuWait):
    """See Note [Waits for a GPU]. `late` returns the workers for which the GPU waits, if known. Its owner closes it."""

    def __init__(self, neighbours: WatchedPeers, free: Callable[[], None], late: Callable[[], list[int]]) -> None:
        super().__init__(free)
        self._neighbours, self._late = neighbours, late
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lockstep-watchdog", daemon=True)
        self._thread.start()

    def verdict(self) -> PeerGone:
        """The error for a loss that a peer noticed first: it has released all streams, and has accused or hung up."""
        left = self._neighbours.accusers() or self._neighbours.gone() or self._neighbours.peers
        return self.failure or self._neighbours.blame(left[0], ENDED)

    def close(self) -> None:
        """Ends the thread. The neighbours' connections should be closed before, which wakes it."""
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        self._look_for_losses()
        while self.failure is not None and not self._closed.wait(FREE_AGAIN_S):
            self._free()  # a stream that still runs may wait again

    def _look_for_losses(self) -> None:
        while self.failure is None and not self._closed.is_set():
            gone = self._neighbours.await_gone(LOOK_S)
            if self._closed.is_set() or self._neighbours.closed:
                return
            limit_s = self._neighbours.timeout_s
            if gone:
                self.fail(self._neighbours.blame(gone[0], ENDED))
            elif self.has_waited_s() > limit_s:
                self.fail(self._blame_silent(limit_s))

    def _blame_silent(self, limit_s: float) -> PeerGone:
        late = self._late()
        if late:
            return self._neighbours.blame(late[0], f"its GPU has been silent for {limit_s:g} s")
        peers = self._neighbours.peers
        who = f"it or another one of workers {', '.join(map(str, peers))}" if len(peers) > 1 else "it"
        cause = f"a sum on the GPUs has not ended for {limit_s:g} s: {who} is silent"
        return self._neighbours.blame(peers[0] if peers else 0, cause)
