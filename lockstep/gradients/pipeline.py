"""From what a lane leaves in `p.grad` to the wire: buckets are folded when they are full, and leave in their order.

# Note [Launch order]
# Buckets leave in layout order, not in the order they fill: two workers may fill them differently, and a
# collective is matched by position. A bucket that is full while an earlier one is not waits for it, at the latest until
# the end of the lanes, where all that any worker used leaves. A bucket nobody used is not sent.
"""

from collections.abc import Sequence

import torch

from lockstep.errors import naming_lost_worker
from lockstep.events import BucketFilled, Events, LaneGradients, ReduceBegan, ReduceDone
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.fold import fold_lane
from lockstep.gradients.record import StepRecord
from lockstep.gradients.step import StepInFlight


class BucketPipeline:
    """Takes the gradients of lanes into the buckets of the step under way, and hands these to the wire."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def bucket_is_full(self, step: StepInFlight, number: int) -> None:
        """In the middle of a backward pass: folds all buckets that can leave now."""
        if not step.folds_early:
            return
        step.full.add(number)
        while step.folded in step.full and step.buckets[step.folded].filled():
            self.fold(step, [step.buckets[step.folded]])
            if step.recording is None:
                self.launch(step, step.folded - 1)
            else:
                step.recording.bucket_is_full()

    def look(self, step: StepInFlight, bucket: Bucket, *, as_folded: bool) -> None:
        """Who looks at the gradients of lanes does so; `as_folded`: in the dtype in which they are added."""
        if self._events.has_readers(LaneGradients):
            self._events.emit(LaneGradients, step.lane, bucket.gradients(), step=step.plan.step)
        if step.marks is not None:
            step.marks.look(step.lane, bucket.gradients())
        if step.health.looks:
            step.health.look(step.lane, bucket.entering_gradients() if as_folded else bucket.gradients())

    def fold(self, step: StepInFlight, buckets: Sequence[Bucket]) -> None:
        """Takes what the lane under way has left in `p.grad` of these buckets, which are the next ones."""
        for bucket in buckets:
            self.look(step, bucket, as_folded=True)
            if step.squares is not None:
                step.squares.look(step.lane, bucket.numbered_gradients())
        fold_lane(buckets, step.weight, step.fold.merges[step.position])
        step.folded += len(buckets)

    def fold_rest(self, step: StepInFlight) -> None:
        """The lane ends: what it has left in `p.grad` is taken."""
        self.fold(step, step.buckets[step.folded :])

    def launch(self, step: StepInFlight, number: int, after: torch.cuda.Event | None = None) -> None:
        """Hands a bucket to the wire; on a GPU its gradients are there `after` an event, or after all so far."""
        at = step.plan.step

        def reduce() -> None:
            self._events.emit(ReduceBegan, number, step=at)
            with naming_lost_worker(at, f"reduce of bucket {number}"):
                step.agreement.check()
                self._add(step, step.buckets[number], is_last=number == len(step.buckets) - 1)
            self._events.emit(ReduceDone, number, step=at)

        self._events.emit(BucketFilled, number, step=at)
        step.launched.append(step.generation.wire.sequence.submit(reduce, after))

    def launch_rest(self, step: StepInFlight, record: StepRecord) -> None:
        """The lanes have ended: what any worker has used leaves too."""
        for number in range(len(step.launched), len(step.buckets)):
            if any(record.used[slot.index] for slot in step.buckets[number].layout.slots):
                self.launch(step, number)

    def _add(self, step: StepInFlight, bucket: Bucket, is_last: bool) -> None:
        """Collective. On the thread of the wire: adds a bucket over all workers."""
        reducer = step.generation.wire.reducer
        add = reducer.reduce_unclosed if is_last else reducer.reduce
        add(step.reduction, bucket.roots(), bucket.total)
