"""Reduction in GPU memory that the workers of one host have open to each other: every worker adds its slice for all.

# Note [Direct slices on GPUs]
# As in shared memory (wire/shared/reducer.py), with streams instead of workers: a stream arrives, waits until all have,
# adds its slice over all roots in tree order, writes it to every worker's place, and goes on when all have done theirs.
# Workers exchange the addresses of the memory when they first reduce it; from then on a reduction puts three operations
# into a stream, and no host waits for another. Workers may share a GPU, or have one each with peer access. An
# all-gather is the same with copies of the peers' slices instead of the addition.

# Note [What may be remembered]
# The exchange of addresses is collective, so all workers must remember the same ones. Buckets are laid out alike on all
# workers, and each is allocated once, or they take turns in the same memory on all workers: a reduction of memory from
# `allocate` is new to all or to none. Other tensors pass through memory that grows as needed, on each worker in its own
# way: their addresses are exchanged each time.

# Note [Closing while others launch]
# When a worker is lost, the wire is closed while its thread may still put reductions into the stream. Work on memory
# that is not open any more would break the process's whole use of the GPU. So `close` first releases all waits, then
# waits for the reduction that is being launched, and for the GPU; later ones are refused. A peer's stream may write its
# counter after it was released, and the peer then die or be stopped: so waits are released again and again until the
# GPU is done. Memory that other tensors passed through stays as long as this object: peers may still have it open.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from lockstep.errors import Disagreement, PeerGone
from lockstep.lanes import Reduction, Root
from lockstep.wire.cuda import driver
from lockstep.wire.cuda.counters import StreamCounters
from lockstep.wire.cuda.gpu import FREE_AGAIN_S, Gpu, GpuWatchdog, StreamEvent, refuse_another_gpu
from lockstep.wire.cuda.kernels import Slice, Work, aligned_slices, summation
from lockstep.wire.cuda.memory import DeviceMemory
from lockstep.wire.exchange import exchange_texts
from lockstep.wire.reducer import Reducer, Slices, check_slices
from lockstep.wire.transport import DATA, Transport


class GpuMemoryReducer(Reducer):
    """A Reducer for CUDA tensors of the workers of one host. The `cpu_reducer` reduces those on the CPU.

    `transport` carries the messages of Note [What may be remembered]; the `watchdog` wakes this worker when it waits
    for its GPU and a peer is gone.
    """

    def __init__(
        self, gpu: Gpu, counters: StreamCounters, transport: Transport, watchdog: GpuWatchdog, cpu_reducer: Reducer
    ) -> None:
        self._gpu, self._counters, self._transport, self._watchdog = gpu, counters, transport, watchdog
        self._memory = DeviceMemory(gpu.device)
        self._cpu_reducer = cpu_reducer
        self._works: dict[tuple[object, ...], Work] = {}
        self._staged: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._last: StreamEvent | None = None
        self._lock = threading.Lock()
        self._closed = False

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != self._memory.device.type or num_elements == 0:
            return self._cpu_reducer.allocate(num_elements, dtype, device)
        refuse_another_gpu(device, self._memory.device)
        return self._memory.allocate(num_elements * dtype.itemsize).view(dtype)

    def release(self, tensor: torch.Tensor) -> None:
        if self._memory.is_own(tensor):
            self._works.clear()
            self._memory.release(tensor)
        else:
            self._cpu_reducer.release(tensor)

    def reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Collective. Puts the sum into the current stream. See Note [Direct slices on GPUs]."""
        if total.device.type != self._memory.device.type:
            self._cpu_reducer.reduce(reduction, roots, total)
        elif total.numel() > 0:
            with self._while_open():
                self._launch(reduction, roots, total, everywhere=True)

    def reduce_scatter(
        self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor, slices: Slices
    ) -> None:
        """Collective. Cheaper than `reduce` where the slices are the `aligned_slices` of the kernel."""
        check_slices(slices, total.numel(), self._transport.world.size)
        if total.device.type != self._memory.device.type:
            self._cpu_reducer.reduce_scatter(reduction, roots, total, slices)
        elif total.numel() > 0:
            aligned = aligned_slices(total.numel(), len(slices), total.element_size())
            with self._while_open():
                self._launch(reduction, roots, total, everywhere=list(slices) != aligned)

    def reduce_unclosed(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        if total.device.type != self._memory.device.type:
            self._cpu_reducer.reduce_unclosed(reduction, roots, total)
        else:
            self.reduce(reduction, roots, total)

    def all_gather(self, total: torch.Tensor, slices: Slices) -> None:
        """Collective. Puts copies of the peers' slices into the current stream."""
        check_slices(slices, total.numel(), self._transport.world.size)
        if total.device.type != self._memory.device.type:
            self._cpu_reducer.all_gather(total, slices)
        elif total.numel() > 0:
            with self._while_open():
                self._launch_copies(total, tuple(slices))

    def closing_barrier(self) -> bool:
        """Waits for this worker's GPU, then closes what the CPU's reducer may have left open."""
        self.synchronize()
        return self._cpu_reducer.closing_barrier()

    def synchronize(self) -> None:
        if self._last is not None:
            last, self._last = self._last, None
            self._watchdog.wait(last)
            if self._counters.released:  # by another worker, which noticed a death first
                raise self._watchdog.verdict()

    def awaited(self) -> list[int]:
        is_waiting = not self._closed and self._watchdog.has_waited_s() > 0
        return self._counters.behind() if is_waiting else self._cpu_reducer.awaited()

    def close(self) -> None:
        """See Note [Closing while others launch]."""
        self._cpu_reducer.close()  # closes the sockets: the watchdog wakes, and exchanges end
        if not self._closed:
            self._closed = True
            self._watchdog.close()
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

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """See Note [Closing while others launch]."""
        with self._lock:
            if self._closed:
                raise PeerGone(self._transport.world.rank, "the connection was closed here")
            yield

    def _launch(
        self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor, *, everywhere: bool
    ) -> None:
        shared = [self._shared(root, slot, filled=True) for slot, root in enumerate(roots)]
        place = shared[0] if roots and roots[0] is total else self._shared(total, len(roots), filled=False)
        addressed = [tensor.data_ptr() for tensor in (place, *shared)]
        key = (reduction, everywhere, place.dtype, place.numel(), *addressed)
        work = self._works.get(key) if all(map(self._memory.is_own, (*roots, total))) else None
        if work is None:  # see Note [What may be remembered]
            addresses = self._exchange_addresses([*shared, place], place)
            work = self._works[key] = _additions(reduction, addresses, place, self._transport.world.rank, everywhere)
        self._run(work)
        if place.data_ptr() != total.data_ptr():
            total.copy_(place)
        self._last = self._gpu.mark()

    def _launch_copies(self, total: torch.Tensor, slices: tuple[range, ...]) -> None:
        shared, rank = self._shared(total, 0, filled=True), self._transport.world.rank
        key = (slices, total.dtype, total.numel(), total.data_ptr())
        work = self._works.get(key)
        if work is None:  # see Note [What may be remembered]
            work = _copies(self._exchange_addresses([shared], total, f" in slices {slices}"), total, slices, rank)
            if self._memory.is_own(total):
                self._works[key] = work
        self._run(work)
        self._last = self._gpu.mark()

    def _run(self, work: Work) -> None:
        """Puts the work into the current stream, between the waits for all workers to arrive and to be done."""
        stream = self._gpu.stream()
        self._counters.begin()
        self._counters.await_arrivals(stream)
        work(stream)
        self._counters.await_done(stream)

    def _exchange_addresses(
        self, tensors: Sequence[torch.Tensor], like: torch.Tensor, suffix: str = ""
    ) -> dict[int, list[int]]:
        """Collective. Where every worker's tensors are, by rank, as this worker's GPU sees them."""
        rank = self._transport.world.rank
        fact = f"{like.numel()} elements of {str(like.dtype).removeprefix('torch.')}{suffix}"
        mine = {"fact": fact, "pieces": [self._memory.shown(tensor) for tensor in tensors]}
        records = [json.loads(text) for text in exchange_texts(self._transport, json.dumps(mine), DATA)]
        for other, theirs in enumerate(records):
            if theirs["fact"] != fact:
                raise Disagreement("the bucket to reduce", rank, fact, other, theirs["fact"])
        addresses = {
            member: [self._memory.opened(member, *piece) for piece in theirs["pieces"]]
            for member, theirs in enumerate(records)
            if member != rank
        }
        addresses[rank] = [tensor.data_ptr() for tensor in tensors]
        return addresses

    def _shared(self, tensor: torch.Tensor, slot: int, *, filled: bool) -> torch.Tensor:
        """The tensor itself if peers can open it, else its place in memory kept for that, `filled` or not."""
        if self._memory.is_own(tensor):
            return tensor
        kept = self._staged.get((tensor.dtype, slot))
        if kept is None or kept.numel() < tensor.numel():
            kept = self._staged[tensor.dtype, slot] = self.allocate(tensor.numel(), tensor.dtype, tensor.device)
        staged = kept[: tensor.numel()]
        return staged.copy_(tensor) if filled else staged


def _additions(
    reduction: Reduction, addresses: Mapping[int, Sequence[int]], place: torch.Tensor, rank: int, everywhere: bool
) -> Work:
    """The sum of worker `rank`'s slice, written for itself or for all.

    `addresses` are every worker's roots and, last, its place for the sum.
    """
    part = aligned_slices(place.numel(), len(addresses), place.element_size())[rank]
    skipped = part.start * place.element_size()
    values = {
        Root(member, index): address + skipped
        for member, theirs in addresses.items()
        for index, address in enumerate(theirs[:-1])
    }
    members = sorted(addresses, key=lambda member: (member != rank, member))
    places = [addresses[member][-1] + skipped for member in (members if everywhere else [rank])]
    return summation(reduction.tree, values, places, Slice(len(part), place.dtype, place.device))


def _copies(addresses: Mapping[int, Sequence[int]], total: torch.Tensor, slices: Slices, rank: int) -> Work:
    """Copies every peer's slice, out of the tensor that it shows, into `total`."""
    size = total.element_size()
    copies = [
        (total.data_ptr() + part.start * size, addresses[member][0] + part.start * size, len(part) * size)
        for member, part in enumerate(slices)
        if member != rank and part
    ]

    def work(stream: int) -> None:
        for target, source, num_bytes in copies:
            driver.copy(target, source, num_bytes, stream)

    return work
