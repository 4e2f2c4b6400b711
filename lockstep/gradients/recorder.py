"""The step's part in lanes that are recorded into CUDA graphs: what a lane does to it besides its work on the GPU.

# Note [A lane that is replayed]
# While a lane's work is recorded nothing runs on the GPU, but Python does: hooks fire, buckets are folded, losses are
# reported. All that is noted, and the step is put back to where it was. Then, and every time the graph is replayed,
# what was noted is done to the step again: which gradients are used, how high the stacks are, which buffers were
# written, and the event behind each bucket, which is part of the graph. So the reduction of a bucket still begins in
# the middle of the backward pass.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from lockstep.errors import Misuse
from lockstep.gradients.bucket_set import BucketSet
from lockstep.gradients.pipeline import BucketPipeline
from lockstep.gradients.recorded_lane import Recording
from lockstep.gradients.step import StepInFlight


class LaneRecorder:
    """Records the lane under way, or takes a replayed one into the step. See Note [A lane that is replayed]."""

    def __init__(self, buckets: BucketSet, in_flight: Callable[[], StepInFlight], pipeline: BucketPipeline) -> None:
        self._buckets, self._in_flight, self._pipeline = buckets, in_flight, pipeline

    @property
    def layout_number(self) -> int:
        """A recording holds for one layout of the buckets."""
        return self._buckets.number

    @property
    def is_settled(self) -> bool:
        """Whether the buckets will stay as they are: the order of gradients is known, or nothing goes through them."""
        return self._buckets.knows_order or self._in_flight().plan.has_nothing_to_add

    @property
    def lane_place(self) -> Hashable:
        """What the work of the lane under way depends on besides its data: its place in the sum, and its weight."""
        step = self._in_flight()
        return step.fold, step.position, step.weight, step.plan.has_nothing_to_add

    def expects_whole_lane(self) -> bool:
        """Whether the lane under way may be computed by a graph: False if some backward pass was in it before."""
        step = self._in_flight()
        if step.folded:
            raise Misuse(
                f"a captured function was called a second time in a lane of step {step.plan.step}: it computes a whole "
                "lane, with its gradients taken at the end. Call it once in each lane, with all of the lane's data."
            )
        return not any(bucket.has_gradients() for bucket in self._buckets.buckets)

    def prepare(self) -> Recording:
        """For the lane under way, with all memory made that it will need."""
        step = self._in_flight()
        for bucket in step.buckets:
            bucket.prepare(max(1, step.fold.depth))
        return Recording.of(len(step.buckets))

    @contextmanager
    def record(self, recording: Recording) -> Iterator[None]:
        """Inside, a lane's work is recorded, to the end of its folding; afterwards the step is where it was before."""
        step = self._in_flight()
        before = [bucket.begin_recording() for bucket in step.buckets]
        self._buckets.watch.lane_begins()
        step.recording = recording
        try:
            yield
            self._finish(recording, step)
        finally:
            step.recording = None
            for bucket, standing in zip(step.buckets, before, strict=True):
                bucket.end_recording(standing)
            for bucket in self._buckets.buckets:
                bucket.forget_gradients()
            step.buffers.put_back()
            step.forget_lane()
            self._buckets.watch.lane_begins()

    def _finish(self, recording: Recording, step: StepInFlight) -> None:
        self._buckets.watch.lane_ends()
        self._pipeline.fold(step, step.buckets[step.folded :])
        replaced = step.buffers.replaced()
        if replaced:
            raise RuntimeError(f"it puts a new tensor in the place of buffer {replaced[0]}: write into it instead")
        recording.reached = [bucket.reached for bucket in step.buckets]
        recording.written = step.buffers.written()
        recording.weight = step.record.weights[step.lane]
        recording.gradients = {i: g for bucket in self._buckets.buckets for i, g in bucket.numbered_gradients().items()}

    def take(self, recording: Recording) -> None:
        """The work of the lane under way was put into the current stream by a graph: the step is as far as that."""
        step = self._in_flight()
        for bucket, reached in zip(step.buckets, recording.reached, strict=True):
            bucket.replayed(reached, step.fold.merges[step.position])
        step.folded = len(step.buckets)
        step.buffers.replayed(recording.written)
        for bucket in self._buckets.buckets:
            bucket.give_gradients(recording.gradients)
        if recording.losses:
            step.record.weights[step.lane] = recording.weight
            step.losses[step.lane] = list(recording.losses)
        if step.on_last_lane:
            for number in range(recording.num_full):
                self._pipeline.launch(step, number, recording.ready[number])
