"""The sum of the gradients, once on a host.

# Note [A gradient that may be written]
# `p.grad` is a view of a private mapping (Note [A view that may be written] in wire/shared/once.py). A script that
# scales a gradient gets copies of those pages, on its own worker, and the update of that worker's elements reads them.
# They are given up when the next sum is handed over.
"""

from collections.abc import Sequence

import torch

from lockstep.gradients.bucket import FlatBuffer
from lockstep.gradients.layout import BucketLayout, Layout
from lockstep.lanes import Reduction
from lockstep.strategies.sharded.lent_buffers import LendingBucket, LentBuffers
from lockstep.strategies.sharded.once import Form, OnceTensors, map_once
from lockstep.wire import Wire
from lockstep.wire.network.hierarchical import HierarchicalReducer
from lockstep.wire.shared.reducer import SharedMemoryReducer

OnceReducer = SharedMemoryReducer | HierarchicalReducer


class SummedGradients:
    """The sums of all buckets of a layout, in memory that all workers of a host share."""

    def __init__(self, wire: Wire, reducer: OnceReducer, layout: Layout) -> None:
        self._wire, self._reducer, self._layout = wire, reducer, layout
        self._once: OnceTensors | None = None

    def add(self, number: int, reduction: Reduction, roots: Sequence[torch.Tensor], closes: bool) -> None:
        """Collective. On the thread of the wire. The bucket is added up; `finish` completes it."""
        if self._once is None:
            self._once = map_once(self._wire, self._forms(), {})
        self._reducer.reduce_once(reduction, roots, self._once.shared[_sum(number)], closes=closes)

    def finish(self, number: int, scale: float) -> None:
        """This worker's slices of the sum are scaled, and stand in the dtype of the parameters too."""
        assert self._once is not None
        whole = self._once.shared[_sum(number)]
        for own in self._reducer.own_parts(whole.numel()):
            if scale != 1.0:
                whole[own].mul_(scale)
            if self._layout.buckets[number].converts:
                self._once.shared[_gradient(number)][own] = whole[own]

    def sum_of(self, number: int) -> torch.Tensor:
        """For this worker's script: the sum as it was added up."""
        assert self._once is not None
        return self._once.views[_sum(number)]

    def gradient_of(self, number: int) -> torch.Tensor:
        """The same in the dtype of the parameters. See Note [A gradient that may be written]."""
        if not self._layout.buckets[number].converts:
            return self.sum_of(number)
        assert self._once is not None
        return self._once.views[_gradient(number)]

    def forget_writes(self) -> None:
        if self._once is not None:
            self._once.forget(self._once.written(self._once.views))

    def _forms(self) -> dict[str, Form]:
        forms = {}
        for number, bucket in enumerate(self._layout.buckets):
            forms[_sum(number)] = Form((bucket.num_elements,), (1,), bucket.dtype)
            if bucket.converts:
                forms[_gradient(number)] = Form((bucket.num_elements,), (1,), bucket.parameter_dtype)
        return forms


class OnceBucket(LendingBucket):
    """A bucket whose sum is mapped by all workers of the host."""

    def __init__(
        self, layout: BucketLayout, parameters: Sequence[torch.nn.Parameter], sums: SummedGradients,
        buffers: LentBuffers, wire: Wire, number: int,
    ) -> None:  # fmt: skip
        super().__init__(layout, parameters, buffers, wire.reducer, number)
        self._sums = sums
        self._shown: tuple[FlatBuffer, FlatBuffer] | None = None

    @property
    def views(self) -> list[torch.Tensor]:
        return self._flats()[0].views

    @property
    def result(self) -> FlatBuffer:
        return self._flats()[1]

    def add(self, reduction: Reduction, closes: bool) -> None:
        self._sums.add(self.number, reduction, self.roots(), closes)

    def finish_own(self, scale: float) -> None:
        self._sums.finish(self.number, scale)

    def finish(self) -> None:
        """Each worker has finished its slice before the commit."""

    def forget_writes(self) -> None:
        self._sums.forget_writes()

    def _handed_over(self) -> Sequence[FlatBuffer]:
        return () if self._shown is None else self._shown

    def _flats(self) -> tuple[FlatBuffer, FlatBuffer]:
        """The sum as it was added up, and as `p.grad` shows it; made once, so that `p.grad` stays the same object."""
        if self._shown is None:
            both = self._sums.sum_of(self.number), self._sums.gradient_of(self.number)
            one, two = (FlatBuffer(whole, self.layout.cut(whole)) for whole in both)
            self._shown = one, two
        return self._shown


def once_buckets(wire: Wire, layout: Layout, parameters: Sequence[torch.nn.Parameter]) -> list[OnceBucket] | None:
    """Buckets whose sums stand once on each host; None where a host has no memory that its workers share."""
    if not isinstance(wire.reducer, OnceReducer):
        return None
    sums, buffers = SummedGradients(wire, wire.reducer, layout), LentBuffers(wire.reducer, layout)
    return [OnceBucket(bucket, parameters, sums, buffers, wire, number) for number, bucket in enumerate(layout.buckets)]


def _sum(number: int) -> str:
    return f"sum of bucket {number}"


def _gradient(number: int) -> str:
    return f"gradient of bucket {number}"
