"""The ways to add one float32 tensor over all workers, and the copy that is the memory's own speed.

# Note [The floor]
# An all-reduce in place reads every worker's tensor once and writes every worker's tensor once: P bytes each, 2·W·P in
# all. All workers copying P bytes at the same time read and write as much and do nothing else. It is a measure, not a
# bound: a copy writes to memory that it has not read, which most processors fetch first, and it touches two tensors
# where an all-reduce in place touches one. So an all-reduce of large tensors may be faster. Where the tensors fit into
# caches the copy is faster than any exchange between cores can be; there it is far below, and says little.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from lockstep.programs.bench.allreduce.algorithms import SHARED
from lockstep.programs.bench.allreduce.plan import FLOOR, GLOO, LOCKSTEP
from lockstep.programs.bench.allreduce.sizes import ELEMENT_BYTES
from lockstep.programs.explain.schedules.catalogue import Setting, find
from lockstep.wire import Wire
from lockstep.wire.schedules import one_root_each
from lockstep.wire.schedules.executor import Executor
from lockstep.world import World

CPU = torch.device("cpu")

Reduce = Callable[[Tensor], None]
"""Collective. Afterwards the tensor holds the sum of all workers' tensors."""


class Side(Protocol):
    """One way, for one size; `tensor` is what the operation leaves its result in."""

    tensor: Tensor

    def operate(self) -> None:
        """Collective, but for the floor."""


class Lockstep:
    """In place, in memory that the wire gave, one lane for each worker: as a bucket of gradients is added."""

    def __init__(self, wire: Wire, reduce: Reduce, num_elements: int, device: torch.device = CPU) -> None:
        self.tensor = wire.reducer.allocate(num_elements, torch.float32, device)
        self._reduce = reduce

    def operate(self) -> None:
        self._reduce(self.tensor)


class Gloo:
    """torch's own, straight from its process group: without what torch.distributed puts around it in Python."""

    def __init__(self, group: ProcessGroupGloo, num_elements: int, device: torch.device = CPU) -> None:
        self.tensor = torch.empty(num_elements, device=device)
        self._tensors = [self.tensor]
        self._group: Any = group

    def operate(self) -> None:
        self._group.allreduce(self._tensors).wait()


class Floor:
    """See Note [The floor]."""

    def __init__(self, num_elements: int) -> None:
        # Written, not zeros from the kernel: memory that was never written to is one page of zeros, read over and over.
        self.tensor, self._source = torch.ones(num_elements), torch.ones(num_elements)

    def operate(self) -> None:
        self.tensor.copy_(self._source)


@contextmanager
def open_sides(num_bytes: int, wire: Wire, reduce: Reduce, group: ProcessGroupGloo) -> Iterator[dict[str, Side]]:
    """All sides by name, each with memory of its own, which is given back."""
    num_elements = num_bytes // ELEMENT_BYTES
    ours = Lockstep(wire, reduce, num_elements)
    try:
        yield {LOCKSTEP: ours, GLOO: Gloo(group, num_elements), FLOOR: Floor(num_elements)}
    finally:
        wire.reducer.release(ours.tensor)


def reduce_by(algorithm: str, wire: Wire) -> Reduce:
    """How lockstep adds by the algorithm of this name: one tensor from every worker, each a lane of its own."""
    num_workers = wire.world.size
    if algorithm == SHARED:
        whole = one_root_each(num_workers)
        return lambda tensor: wire.reducer.reduce(whole, [tensor], tensor)
    executor = Executor(wire.transport)
    schedule = find("all_reduce", algorithm).schedule(Setting(num_workers))
    return lambda tensor: executor.run(schedule, tensor)


@contextmanager
def open_gloo(world: World, store: Store, timeout_s: float) -> Iterator[ProcessGroupGloo]:
    """Collective. A process group for Gloo's side alone, on loopback, its fastest way between processes of a host."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = ProcessGroupGloo(PrefixStore("bench/gloo", store), world.rank, world.size, options)
    try:
        yield group
    finally:
        group.abort()
