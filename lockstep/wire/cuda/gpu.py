"""The GPU of a worker: its current stream, the waits for it, and the watchdog that ends them when a peer is gone.

# Note [Waits for a GPU]
# A host that waits for its own GPU cannot watch its peers, and if one has died the GPU may wait for ever. So a thread
# of its own sleeps on the sockets to the neighbours. When one hangs up, or this worker has waited for longer than the
# limit, the thread frees the waits of the GPU; the worker that waited wakes up, and raises PeerGone instead of using
# the sum. Between hosts the watchers of Gloo's connections do the same.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from lockstep.errors import BadArgument, PeerGone
from lockstep.wire.shared.neighbours import ENDED, Neighbours

LOOK_S = 0.5
FREE_AGAIN_S = 0.02


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
        self._failure: PeerGone | None = None
        self._since_s: float | None = None

    def wait(self, event: StreamEvent) -> None:
        """Returns when the GPU has reached `event`; raises PeerGone if a peer is gone, or silent for too long."""
        self._since_s = time.monotonic()
        event.synchronize()
        self._since_s = None
        if self._failure is not None:
            raise self._failure

    def fail(self, failure: PeerGone) -> None:
        """Every wait, now or later, raises this. Any thread."""
        self._failure = self._failure or failure
        self._free()

    def has_waited_s(self) -> float:
        """For how long the wait under way has lasted; 0 if there is none."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def close(self) -> None:
        """May be called only when no wait is under way, or will be."""


class GpuWatchdog(GpuWait):
    """See Note [Waits for a GPU]. `late` returns the workers for which the GPU waits, if known. Its owner closes it."""

    def __init__(self, neighbours: Neighbours, free: Callable[[], None], late: Callable[[], list[int]]) -> None:
        super().__init__(free)
        self._neighbours, self._late = neighbours, late
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lockstep-watchdog", daemon=True)
        self._thread.start()

    def verdict(self) -> PeerGone:
        """The error for a loss that a peer noticed first: it has released all streams, and has accused or hung up."""
        left = self._neighbours.accusers() or self._neighbours.gone() or self._neighbours.peers
        return self._failure or self._neighbours.blame(left[0], ENDED)

    def close(self) -> None:
        """Ends the thread. The neighbours' connections should be closed before, which wakes it."""
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        self._look_for_losses()
        while self._failure is not None and not self._closed.wait(FREE_AGAIN_S):
            self._free()  # a stream that still runs may wait again

    def _look_for_losses(self) -> None:
        while self._failure is None and not self._closed.is_set():
            gone = self._neighbours.await_gone(LOOK_S)
            if self._closed.is_set() or self._neighbours.closed:
                return
            limit_s = self._neighbours.timeout_s
            if gone:
                self.fail(self._neighbours.blame(gone[0], ENDED))
            elif self.has_waited_s() > limit_s:
                silent = (self._late() or self._neighbours.peers)[0]
                self.fail(self._neighbours.blame(silent, f"its GPU has been silent for {limit_s:g} s"))
