"""The ways to add one float32 tensor over all workers in the memory of GPUs, and the memory's own speed.

# Note [The floor on a GPU]
# An all-reduce in place reads every worker's tensor once and writes every worker's tensor once: 2·W·P bytes. Workers
# that share a GPU share its memory, so the floor is that many bytes at the speed of a copy: what one process alone
# reads and writes in a second while it copies 1 GiB. Small tensors stay in the GPU's cache and may be below it, and
# workers with a GPU each have W memories.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed import ProcessGroupGloo

from lockstep.programs.bench.allreduce.plan import GLOO, LOCKSTEP
from lockstep.programs.bench.allreduce.sides import Gloo, Lockstep, Reduce, Side
from lockstep.programs.bench.allreduce.sizes import ELEMENT_BYTES
from lockstep.wire import Wire

COPIES = 4

Wait = Callable[[], None]
"""Returns once the device has done all that it was given."""


@contextmanager
def open_sides(
    num_bytes: int, wire: Wire, reduce: Reduce, group: ProcessGroupGloo, device: torch.device
) -> Iterator[dict[str, Side]]:
    """Both ways to add by name, each with memory of its own, which is given back."""
    num_elements = num_bytes // ELEMENT_BYTES
    ours = Lockstep(wire, reduce, num_elements, device)
    try:
        yield {LOCKSTEP: ours, GLOO: Gloo(group, num_elements, device)}
    finally:
        wire.reducer.release(ours.tensor)


class Memory:
    """The memory of the first worker's device, to be measured. See Note [The floor on a GPU]."""

    def __init__(self, num_bytes: int, device: torch.device, wait: Wait) -> None:
        # Written, not only asked for: memory that was never written to may be one page, read over and over.
        self._target, self._source = (torch.ones(num_bytes // ELEMENT_BYTES, device=device) for _ in range(2))
        self._num_bytes, self._wait = num_bytes, wait

    def bytes_per_s(self) -> float:
        """Bytes read and bytes written, together."""
        self._target.copy_(self._source)
        self._wait()
        began_s = time.perf_counter()
        for _ in range(COPIES):
            self._target.copy_(self._source)
        self._wait()
        return 2 * COPIES * self._num_bytes / (time.perf_counter() - began_s)


def floor_ms(num_bytes: int, num_workers: int, bytes_per_s: float) -> float:
    """See Note [The floor on a GPU]."""
    return 1000 * 2 * num_workers * num_bytes / bytes_per_s
