"""The memory in which each worker's lane waits to be added to a sum that stands once on a host.

# Note [Lent buffers]
# A worker with one lane needs the memory of a bucket only from the moment when autograd has filled it until it is added
# up. So its buckets take turns in NUM_BUFFERS buffers: a bucket is folded when the reduction of the bucket that had the
# buffer before is over. That cannot wait for ever: every worker hands all of its buckets to the wire, in order, before
# it waits for the others in any other way. A worker with several lanes needs memory for the partial sum of all of them,
# so its buckets have memory of their own. So do those of a worker whose lanes are recorded: a graph folds all buckets
# at once.
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress

import torch

from lockstep.gradients.bucket import Bucket, FlatBuffer
from lockstep.gradients.layout import BucketLayout, Layout
from lockstep.gradients.pipeline import BucketPipeline
from lockstep.gradients.step import StepInFlight
from lockstep.lanes import Reduction
from lockstep.wire import Reducer

NUM_BUFFERS = 2
"""See Note [Lent buffers]."""


class LentBuffers:
    """The memory that the buckets of a layout have in turns. See Note [Lent buffers]."""

    def __init__(self, reducer: Reducer, layout: Layout) -> None:
        self._reducer, self._layout = reducer, layout
        self._buffers: dict[int, torch.Tensor] = {}

    def of(self, number: int) -> torch.Tensor:
        """That of a bucket, for a while."""
        turn, bucket = number % NUM_BUFFERS, self._layout.buckets[number]
        if turn not in self._buffers:
            most = max(other.num_bytes for other in self._layout.buckets[turn::NUM_BUFFERS])
            self._buffers[turn] = self._reducer.allocate(most, torch.uint8, bucket.device)
        return self._buffers[turn][: bucket.num_bytes].view(bucket.dtype)

    def close(self) -> None:
        for buffer in self._buffers.values():
            self._reducer.release(buffer)
        self._buffers = {}


class LendingBucket(Bucket):
    """A bucket whose sum stands on the host. `number` is its place in the layout."""

    def __init__(
        self, layout: BucketLayout, parameters: Sequence[torch.nn.Parameter], buffers: LentBuffers, reducer: Reducer,
        number: int,
    ) -> None:  # fmt: skip
        super().__init__(layout, parameters, reducer)
        self.number, self._buffers = number, buffers
        self._own, self._lent = self._stack, list[FlatBuffer]()

    @property
    def is_lent(self) -> bool:
        return self._stack is self._lent

    def lend(self, is_lent: bool) -> None:
        """At the beginning of a step: whether its memory is lent. See Note [Lent buffers]."""
        self._stack = self._lent if is_lent else self._own

    @abstractmethod
    def add(self, reduction: Reduction, closes: bool) -> None:
        """Collective. On the thread of the wire. Its sum stands on the host; `finish_own` completes it."""

    @abstractmethod
    def finish_own(self, scale: float) -> None:
        """Before the commit: this worker's slices of the sum are there, to be multiplied by `scale`."""

    def forget_writes(self) -> None:
        """For all buckets of the layout: the views show the sums, whatever a script has written there."""

    def close(self) -> None:
        self._stack = self._own
        super().close()
        self._buffers.close()

    def _allocate(self) -> torch.Tensor:
        return self._buffers.of(self.number) if self.is_lent else super()._allocate()


def lending_in(step: StepInFlight) -> list[LendingBucket]:
    """The buckets of the step that are of this kind: all of them, or none."""
    return [bucket for bucket in step.buckets if isinstance(bucket, LendingBucket)]


class LendingPipeline(BucketPipeline):
    """Folds a lent bucket when its memory is free, and hands all of them to the wire. See Note [Lent buffers]."""

    def fold(self, step: StepInFlight, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if isinstance(bucket, LendingBucket) and bucket.is_lent and bucket.number >= NUM_BUFFERS:
                with suppress(Exception):  # it is raised where the step ends
                    step.launched[bucket.number - NUM_BUFFERS].result()
        super().fold(step, buckets)

    def fold_rest(self, step: StepInFlight) -> None:
        if not any(bucket.is_lent for bucket in lending_in(step)):
            return super().fold_rest(step)
        for bucket in step.buckets[step.folded :]:
            self.fold(step, [bucket])
            self.launch(step, step.folded - 1)
        return None

    def launch_all(self, step: StepInFlight) -> None:
        """Before this worker waits for the others in any other way."""
        for bucket in lending_in(step)[len(step.launched) :]:
            self.launch(step, bucket.number)

    def _add(self, step: StepInFlight, bucket: Bucket, is_last: bool) -> None:
        if isinstance(bucket, LendingBucket):
            bucket.add(step.reduction, closes=not is_last)
        else:
            super()._add(step, bucket, is_last)
