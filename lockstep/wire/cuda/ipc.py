"""Reduction in GPU memory that the workers of one host have open to each other: every worker adds its slice for all.

# Note [Direct slices on GPUs]
# As in shared memory (wire/shared/reducer.py), with streams in the place of workers: the stream comes, waits until all
# have, adds its slice over all roots in tree order, writes it to every worker's place, and goes on when all have done
# theirs. Which memory that is, workers tell each other when they first reduce it; from then on a reduction is three
# things put into a stream, and no host waits for another. Workers may share a GPU, or have one each with peer access.

# Note [What may be remembered]
# Who remembers where a reduction's memory is asks nobody; who does not, asks everybody. So all must remember the same.
# Buckets are laid out alike on all workers, and each is given memory once: a reduction of memory from `allocate` is new
# to all or to none. Other tensors pass through memory that grows as needed, on each worker in its own way: their
# places are told each time.

# Note [Closing while others launch]
# When a worker is lost, the wire is closed while its thread may still put reductions into the stream. Work on memory
# that is not open any more would break the process's whole use of the GPU. So whoever closes first lets all waits go,
# then waits for the reduction that is being launched, and for the GPU; what comes later is refused. A peer's stream may
# write its counter after it was let go, and the peer then die or be stopped: so waits are let go again and again until
# the GPU is done. Memory that other tensors passed through stays as long as this object: peers may have it open still.
"""

import json
import threading
from collections.abc import Mapping, Sequence

import torch

from lockstep.errors import Disagreement, PeerGone
from lockstep.lanes import Reduction, Root
from lockstep.wire.cuda.counters import Counters
from lockstep.wire.cuda.gpu import Gpu, refuse_another_gpu
from lockstep.wire.cuda.kernels import Slice, Work, aligned_slices, summation
from lockstep.wire.cuda.memory import DeviceMemory
from lockstep.wire.cuda.watch import FREE_AGAIN_S, Event, Lookout
from lockstep.wire.exchange import exchange_texts
from lockstep.wire.reducer import Reducer
from lockstep.wire.transport import DATA, Transport


class GpuMemory(Reducer):
    """A Reducer for CUDA tensors of the workers of one host. What is on the CPU goes `otherwise`.

    `transport` carries the small talk of Note [What may be remembered]; the `lookout` wakes this worker when it waits
    for its GPU and a peer is gone.
    """

    def __init__(
        self, gpu: Gpu, counters: Counters, transport: Transport, lookout: Lookout, otherwise: Reducer
    ) -> None:
        self._gpu, self._counters, self._transport, self._lookout = gpu, counters, transport, lookout
        self._memory = DeviceMemory(gpu.device)
        self._otherwise = otherwise
        self._works: dict[tuple[object, ...], Work] = {}
        self._staged: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._last: Event | None = None
        self._lock = threading.Lock()
        self._closed = False

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != self._memory.device.type or num_elements == 0:
            return self._otherwise.allocate(num_elements, dtype, device)
        refuse_another_gpu(device, self._memory.device)
        return self._memory.allocate(num_elements * dtype.itemsize).view(dtype)

    def release(self, tensor: torch.Tensor) -> None:
        if self._memory.is_own(tensor):
            self._works.clear()
            self._memory.release(tensor)
        else:
            self._otherwise.release(tensor)

    def reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Collective. Puts the sum into the current stream. See Note [Direct slices on GPUs]."""
        if total.device.type != self._memory.device.type:
            self._otherwise.reduce(reduction, roots, total)
        elif total.numel() > 0:
            self._reduce(reduction, roots, total)

    def reduce_and_stay(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        if total.device.type != self._memory.device.type:
            self._otherwise.reduce_and_stay(reduction, roots, total)
        else:
            self.reduce(reduction, roots, total)

    def part(self) -> bool:
        """Waits until this worker's GPU has done its part of all reductions; asks nobody."""
        if self._last is not None:
            last, self._last = self._last, None
            self._lookout.wait(last)
            if self._counters.released:  # by another worker, which was faster to notice a death
                raise self._lookout.verdict()
        return self._otherwise.part()

    def awaited(self) -> list[int]:
        is_waiting = not self._closed and self._lookout.has_waited_s() > 0
        return self._counters.behind() if is_waiting else self._otherwise.awaited()

    def close(self) -> None:
        """See Note [Closing while others launch]."""
        self._otherwise.close()  # hangs up: the lookout wakes, and exchanges end
        if not self._closed:
            self._closed = True
            self._lookout.close()
            self._counters.release()
            with self._lock:
                self._finish()
                self._works.clear()
                self._memory.close()
                self._counters.close()

    def _finish(self) -> None:
        finishing = threading.Thread(target=self._gpu.finish, name="lockstep-finish", daemon=True)
        finishing.start()
        while finishing.is_alive():
            finishing.join(FREE_AGAIN_S)
            self._counters.release()

    def _reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        with self._lock:
            if self._closed:
                raise PeerGone(self._transport.world.rank, "the connection was closed here")
            self._launch(reduction, roots, total)

    def _launch(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        shared = [self._shared(root, slot, filled=True) for slot, root in enumerate(roots)]
        place = shared[0] if roots and roots[0] is total else self._shared(total, len(roots), filled=False)
        work = self._work(reduction, shared, place, told_before=all(map(self._memory.is_own, (*roots, total))))
        stream = self._gpu.stream()
        self._counters.begin()
        self._counters.come(stream)
        work(stream)
        self._counters.part(stream)
        if place.data_ptr() != total.data_ptr():
            total.copy_(place)
        self._last = self._gpu.mark()

    def _work(
        self, reduction: Reduction, roots: Sequence[torch.Tensor], place: torch.Tensor, told_before: bool
    ) -> Work:
        """The additions of this worker's slice. See Note [What may be remembered]."""
        key = (reduction, place.dtype, place.numel(), place.data_ptr(), *(root.data_ptr() for root in roots))
        work = self._works.get(key) if told_before else None
        if work is None:
            work = self._works[key] = self._agreed(reduction, roots, place)
        return work

    def _agreed(self, reduction: Reduction, roots: Sequence[torch.Tensor], place: torch.Tensor) -> Work:
        """Collective. Workers tell each other where their roots and places are."""
        rank = self._transport.world.rank
        fact = f"{place.numel()} elements of {str(place.dtype).removeprefix('torch.')}"
        mine = {"fact": fact, "pieces": [self._memory.shown(tensor) for tensor in (*roots, place)]}
        told = [json.loads(text) for text in exchange_texts(self._transport, json.dumps(mine), DATA)]
        for other, theirs in enumerate(told):
            if theirs["fact"] != fact:
                raise Disagreement("the bucket to reduce", rank, fact, other, theirs["fact"])
        addresses = {
            member: [self._memory.opened(member, *piece) for piece in theirs["pieces"]]
            for member, theirs in enumerate(told)
            if member != rank
        }
        addresses[rank] = [tensor.data_ptr() for tensor in (*roots, place)]
        return _additions(reduction, addresses, place, rank)

    def _shared(self, tensor: torch.Tensor, slot: int, *, filled: bool) -> torch.Tensor:
        """The tensor itself if peers can open it, else its place in memory kept for that, `filled` or not."""
        if self._memory.is_own(tensor):
            return tensor
        kept = self._staged.get((tensor.dtype, slot))
        if kept is None or kept.numel() < tensor.numel():
            kept = self._staged[tensor.dtype, slot] = self.allocate(tensor.numel(), tensor.dtype, tensor.device)
        staged = kept[: tensor.numel()]
        return staged.copy_(tensor) if filled else staged


def _additions(reduction: Reduction, addresses: Mapping[int, Sequence[int]], place: torch.Tensor, rank: int) -> Work:
    """The sum of worker `rank`'s slice. `addresses` are every worker's roots and, last, its place for the sum."""
    part = aligned_slices(place.numel(), len(addresses), place.element_size())[rank]
    skipped = part.start * place.element_size()
    values = {
        Root(member, index): address + skipped
        for member, theirs in addresses.items()
        for index, address in enumerate(theirs[:-1])
    }
    members = sorted(addresses, key=lambda member: (member != rank, member))
    places = [addresses[member][-1] + skipped for member in members]
    return summation(reduction.tree, values, places, Slice(len(part), place.dtype, place.device))
