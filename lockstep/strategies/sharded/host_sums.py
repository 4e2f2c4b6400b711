"""The sum of the gradients of workers on GPUs, once in the memory of their host, and nowhere on a GPU.

# Note [From the wire to the host]
# A bucket is added up in the buffer that it was folded in. Behind the sum, in the stream of the wire, each worker
# copies its slice into the memory of the host, while the backward pass goes on. Then the buffer belongs to the next
# bucket. A worker signals *prepared* when its copies are done: so the commit of a step says that the host has all of
# the sum. If a worker is lost later, the others have its gradient too, and make its part of the update.
"""

from collections.abc import Sequence

import torch

from lockstep.gradients.bucket import FlatBuffer
from lockstep.gradients.layout import BucketLayout, Layout, ParameterSlot
from lockstep.lanes import Reduction
from lockstep.strategies.sharded.host_gradient import HostGradient
from lockstep.strategies.sharded.lent_buffers import LendingBucket, LentBuffers
from lockstep.strategies.sharded.once import Form, OnceTensors, map_once
from lockstep.wire import Wire
from lockstep.wire.cuda.kernels import aligned_slices
from lockstep.wire.cuda.pinned import pin


class HostSums:
    """The sums of all buckets of a layout. See Note [From the wire to the host]."""

    def __init__(self, wire: Wire, layout: Layout) -> None:
        self._wire, self._layout = wire, layout
        self._once: OnceTensors | None = None
        self.scale = 1.0
        """By what they are multiplied when they are read. See Note [Scale of given weights] in gradients/step.py."""

    def add(self, number: int, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Collective. On the thread of the wire: adds a bucket up in `total`, and this worker's slice of it is stored.

        Workers of one host need no more than their slices of the sum. Each of several hosts needs all of it.
        """
        members, reducer = self._wire.host_members, self._wire.reducer
        slices = aligned_slices(total.numel(), len(members), total.element_size())
        if len(members) == self._wire.world.size:
            reducer.reduce_scatter(reduction, roots, total, slices)
        else:
            reducer.reduce(reduction, roots, total)
        self._store(number, total, slices[members.index(self._wire.world.rank)])

    def _store(self, number: int, total: torch.Tensor, own: range) -> None:
        held = self._mapped(total.device).shared[str(number)]
        held[own.start : own.stop].copy_(total[own.start : own.stop], non_blocking=True)

    @torch.no_grad()
    def read(self, number: int, start: int, stop: int) -> torch.Tensor:
        """A copy of elements of a bucket, on the device of its parameters."""
        assert self._once is not None
        bucket, held = self._layout.buckets[number], self._once.shared[str(number)][start:stop]
        copy = torch.empty_like(held, device=bucket.device).copy_(held, non_blocking=True)
        return copy if self.scale == 1.0 else copy.mul_(self.scale)

    def _mapped(self, device: torch.device) -> OnceTensors:
        if self._once is None:
            forms = {
                str(number): Form((bucket.num_elements,), (1,), bucket.dtype)
                for number, bucket in enumerate(self._layout.buckets)
            }
            self._once = map_once(self._wire, forms, {})
            if device.type == "cuda":
                pin(self._once.memory.shared)
        return self._once


class HostBucket(LendingBucket):
    """A bucket whose sum goes to the host; of it, `p.grad` is a HostGradient."""

    def __init__(
        self, layout: BucketLayout, parameters: Sequence[torch.nn.Parameter], sums: HostSums, buffers: LentBuffers,
        wire: Wire, number: int,
    ) -> None:  # fmt: skip
        super().__init__(layout, parameters, buffers, wire.reducer, number)
        self._sums = sums
        self._gradients = [self._gradient(slot) for slot in layout.slots]

    @property
    def views(self) -> list[torch.Tensor]:
        """Copies, as the sum was added up."""
        return self.layout.cut(self._sums.read(self.number, 0, self.layout.num_elements))

    @property
    def handed_over(self) -> Sequence[torch.Tensor]:
        return self._gradients

    def add(self, reduction: Reduction, closes: bool) -> None:
        self._sums.add(self.number, reduction, self.roots(), self.total)

    def finish_own(self, scale: float) -> None:
        """Returns when this worker's GPU is done; raises PeerGone if a loss has ended the sum."""
        self._sums.scale = scale
        self._reducer.synchronize()
        if self.layout.device.type == "cuda":
            torch.cuda.current_stream(self.layout.device).synchronize()

    def finish(self) -> None:
        for gradient in self._gradients:
            gradient.renew()

    def _handed_over(self) -> Sequence[FlatBuffer]:
        return ()

    def _gradient(self, slot: ParameterSlot) -> HostGradient:
        form = Form(slot.spec.shape, slot.spec.stride, slot.spec.dtype, self.layout.device)
        sums, number, offset = self._sums, self.number, slot.offset
        return HostGradient(form, lambda start, stop: sums.read(number, offset + start, offset + stop).to(form.dtype))


def host_buckets(wire: Wire, layout: Layout, parameters: Sequence[torch.nn.Parameter]) -> list[HostBucket]:
    """Buckets whose sums stand once on each host."""
    sums, buffers = HostSums(wire, layout), LentBuffers(wire.reducer, layout)
    return [HostBucket(bucket, parameters, sums, buffers, wire, number) for number, bucket in enumerate(layout.buckets)]
