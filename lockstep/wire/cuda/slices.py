"""Reduction in the order of the lane tree by collectives, each of which defines no order of additions.

# Note [Tree order by collectives]
# NCCL's own all-reduce adds in an order that depends on the number of workers and on the network. So the exact sum
# takes two of its other collectives: an all-to-all brings every worker its slice of all roots; one kernel adds them in
# tree order; an all-gather distributes the slices. With one root each this moves the bytes of a ring, 2·(W-1)/W·P from
# each worker. Buckets are padded so that all slices are alike.

# Note [After an abort]
# When a group is aborted its collectives end, and what is queued in the stream behind them runs on: kernels that add
# and copy what has arrived, which is nothing that counts. They write to buckets and buffers that the next attempt uses
# again. So `close` returns only when the GPU has done all of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from lockstep.errors import PeerGone
from lockstep.lanes import Reduction, Root
from lockstep.wire.cuda.gpu import Gpu, GpuWait, StreamEvent, refuse_another_gpu
from lockstep.wire.cuda.kernels import VECTOR_BYTES, Slice, aligned_slices, summation
from lockstep.wire.network.native import add_up, refuse_unless_added
from lockstep.wire.reducer import Reducer, Slices, check_slices
from lockstep.world import World


class Group(Protocol):
    """Collectives of one generation, on one device for each worker. Its owner calls `abort`.

    Each puts its work into the current stream and returns; it raises PeerGone if a worker is known to be gone.
    """

    world: World
    gpu: Gpu

    def all_reduce(self, tensor: torch.Tensor) -> None: ...

    def all_to_all(self, out: torch.Tensor, given: torch.Tensor, out_sizes: list[int], sizes: list[int]) -> None: ...

    def all_gather(self, out: torch.Tensor, given: torch.Tensor) -> None:
        """`given` may be this worker's part of `out`."""

    def abort(self) -> None:
        """All waits in a stream end. May be called twice, from any thread."""


class SliceReducer(Reducer):
    """A Reducer for tensors on the group's devices, one for each worker. The `cpu_reducer` reduces all others."""

    def __init__(self, group: Group, waiting: GpuWait, cpu_reducer: Reducer, *, exact: bool = True) -> None:
        self._group, self._waiting, self._cpu_reducer, self._exact = group, waiting, cpu_reducer, exact
        self._padded: dict[int, torch.Tensor] = {}
        self._last: StreamEvent | None = None

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Note [Tree order by collectives] for the padding, which the caller does not see."""
        if device.type != self._group.gpu.device.type or num_elements == 0:
            return self._cpu_reducer.allocate(num_elements, dtype, device)
        refuse_another_gpu(device, self._group.gpu.device)
        whole = torch.zeros(self._num_padded(num_elements, dtype), dtype=dtype, device=device)
        self._padded[whole.data_ptr()] = whole
        return whole[:num_elements]

    def release(self, tensor: torch.Tensor) -> None:
        if self._padded.pop(tensor.data_ptr(), None) is None:
            self._cpu_reducer.release(tensor)

    def reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Collective. Puts the sum into the current stream."""
        if total.device.type != self._group.gpu.device.type:
            self._cpu_reducer.reduce(reduction, roots, total)
        elif total.numel() > 0:
            self._add(reduction, roots, total, gathers=True)

    def reduce_scatter(
        self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor, slices: Slices
    ) -> None:
        """Collective. Cheaper than `reduce` where the slices are the `aligned_slices` of the kernel."""
        check_slices(slices, total.numel(), self._group.world.size)
        if total.device.type != self._group.gpu.device.type:
            self._cpu_reducer.reduce_scatter(reduction, roots, total, slices)
        elif total.numel() > 0:
            aligned = aligned_slices(total.numel(), len(slices), total.element_size())
            self._add(reduction, roots, total, gathers=list(slices) != aligned)

    def all_gather(self, total: torch.Tensor, slices: Slices) -> None:
        """Collective. Puts it into the current stream. Moves W times the longest slice: a group's are all alike."""
        check_slices(slices, total.numel(), self._group.world.size)
        if total.device.type != self._group.gpu.device.type:
            self._cpu_reducer.all_gather(total, slices)
        elif total.numel() > 0:
            rooms = total.new_empty(len(slices), max(map(len, slices)))
            own, room = slices[self._group.world.rank], rooms[self._group.world.rank]
            room[: len(own)] = total[own.start : own.stop]
            with self._naming_who_is_gone():
                self._group.all_gather(rooms.view(-1), room)
            for part, filled in zip(slices, rooms, strict=True):
                total[part.start : part.stop] = filled[: len(part)]
            self._last = self._group.gpu.mark()

    def closing_barrier(self) -> bool:
        """Waits for this worker's GPU, then closes what the CPU's reducer may have left open."""
        self.synchronize()
        return self._cpu_reducer.closing_barrier()

    def synchronize(self) -> None:
        if self._last is not None:
            last, self._last = self._last, None
            self._waiting.wait(last)

    def awaited(self) -> list[int]:
        """All the others: the group does not report which one is late."""
        is_waiting = self._waiting.has_waited_s() > 0
        return list(self._group.world.peers) if is_waiting else self._cpu_reducer.awaited()

    def close(self) -> None:
        """See Note [After an abort]."""
        self._cpu_reducer.close()  # first: it closes the sockets, and the watchdog wakes
        self._waiting.close()
        self._group.abort()
        self._group.gpu.finish()
        self._padded.clear()

    @contextmanager
    def _naming_who_is_gone(self) -> Iterator[None]:
        """A collective that was aborted because of a lost worker does not know which: the wait for the GPU does."""
        try:
            yield
        except PeerGone as gone:
            is_closed_here = gone.rank == self._group.world.rank
            raise (self._waiting.failure or gone if is_closed_here else self._waiting.named(gone)) from gone

    def _add(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor, *, gathers: bool) -> None:
        with self._naming_who_is_gone():
            if self._exact:
                self._add_in_tree_order(reduction, roots, total, gathers)
            else:
                self._hand_over(reduction, roots, total)
            self._last = self._group.gpu.mark()

    def _hand_over(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        refuse_unless_added(total.dtype)
        add_up(roots, total)
        self._group.all_reduce(total)

    def _add_in_tree_order(
        self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor, gathers: bool
    ) -> None:
        """See Note [Tree order by collectives]."""
        rank, size = self._group.world.rank, self._group.world.size
        whole = self._whole(total, filled=False)
        length = whole.numel() // size
        received = whole.new_empty(sum(reduction.roots_of) * length)
        sizes = [length * number for number in reduction.roots_of]
        self._group.all_to_all(received, self._by_target(roots, whole), sizes, [length * len(roots)] * size)
        order = (Root(member, index) for member, number in enumerate(reduction.roots_of) for index in range(number))
        step = length * whole.element_size()
        values = {root: received.data_ptr() + number * step for number, root in enumerate(order)}
        own = whole[rank * length : (rank + 1) * length]
        add = summation(reduction.tree, values, [own.data_ptr()], Slice(length, whole.dtype, whole.device))
        add(self._group.gpu.stream())
        if gathers:
            self._group.all_gather(whole, own)
        if whole.data_ptr() != total.data_ptr():
            total.copy_(whole[: total.numel()])

    def _by_target(self, roots: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """What goes to each worker, one after the other: its slice of every root. One root is that already."""
        padded = [self._whole(root, filled=True) for root in roots]
        if len(padded) <= 1:
            return padded[0] if padded else like[:0]
        size = self._group.world.size
        return torch.stack([root.view(size, -1) for root in padded], dim=1).flatten()

    def _whole(self, tensor: torch.Tensor, *, filled: bool) -> torch.Tensor:
        """The tensor with its padding; a copy if it was not allocated here."""
        known, num_padded = self._padded.get(tensor.data_ptr()), self._num_padded(tensor.numel(), tensor.dtype)
        if known is not None and known.nbytes >= num_padded * tensor.itemsize:
            return known.view(torch.uint8)[: num_padded * tensor.itemsize].view(tensor.dtype)
        whole = torch.zeros(num_padded, dtype=tensor.dtype, device=tensor.device)
        if filled:
            whole[: tensor.numel()] = tensor
        return whole

    def _num_padded(self, num_elements: int, dtype: torch.dtype) -> int:
        unit = self._group.world.size * max(1, VECTOR_BYTES // dtype.itemsize)
        return -(-num_elements // unit) * unit
