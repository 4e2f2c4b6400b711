"""Reductions on a stream of their own, behind the backward pass.

# Note [Two streams]
# The caller's stream computes. A job's work goes into the wire's stream, behind an event that the caller's stream has
# recorded when the bucket was full: so it waits for this bucket's gradients only, and the backward pass goes on beside
# it. The thread that asks for the result makes its own stream wait for the job's work; no host waits. What a job reads
# or writes must stay alive until then: the step holds it.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.wire.reduction_queue import Job, ThreadQueue

URGENT = -1
"""A higher priority than other streams of this process: sums are short, and other workers wait for them."""


@dataclass
class StreamReduction:
    """See `PendingReduction`: a job whose work is in the wire's stream, or will be."""

    job: "Future[None]"
    device: torch.device
    done: list[torch.cuda.Event] = field(default_factory=list)

    def result(self) -> None:
        """Returns when the job's work is in the stream; the caller's stream then waits until it is done."""
        self.job.result()
        for event in self.done:
            torch.cuda.current_stream(self.device).wait_event(event)


class StreamQueue:
    """A ReductionQueue whose jobs put their work into one stream. See Note [Two streams]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._background = ThreadQueue()
        self._stream = torch.cuda.Stream(device, priority=URGENT)

    def submit(self, job: Job, after: Any = None) -> StreamReduction:
        ready = torch.cuda.current_stream(self._device).record_event() if after is None else after
        done: list[torch.cuda.Event] = []

        def on_stream() -> None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                job()
                done.append(self._stream.record_event())

        return StreamReduction(self._background.submit(on_stream), self._device, done)

    def fail(self, failure: BaseException) -> None:
        """Fails all jobs with this error, the one under way too. For a job that waits and cannot be woken."""
        self._background.fail(failure)

    def close(self) -> None:
        """What jobs have put into the stream is done afterwards: see Note [After an abort] in slices.py."""
        self._background.close()
        self._stream.synchronize()
