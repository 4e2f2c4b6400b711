"""What a step needs of the wire: memory for its buckets, and their sum over all workers."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch

from lockstep.errors import BadArgument
from lockstep.lanes import Reduction

Slices = Sequence[range]
"""The elements of a flat tensor that belong to each worker, by rank: disjoint, covering, of any size, perhaps empty."""


class Reducer(Protocol):
    """Adds flat tensors over all workers, in the order of the lane tree.

    Collective methods are called by one thread at a time (the wire's queue, or the step while the queue is idle), in
    the same order on every worker. They raise PeerGone when a worker is lost; `total` is undefined then.
    On a GPU they put their work into the current stream and return: `synchronize` waits for it.
    """

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor that the collectives use without a copy. Any thread."""

    def release(self, tensor: torch.Tensor) -> None:
        """The tensor will not be reduced again; its memory stays valid for views. Any thread, between collectives."""

    def reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Collective. Afterwards `total` holds the sum of all workers' roots, the same bits on every worker.

        `roots` are flat tensors like `total`; they may be overwritten. `total` may be `roots[0]` itself.
        """

    def reduce_unclosed(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Collective. As `reduce`, but the barrier that closes it may be left open: one signal to each peer less.

        `total`, which comes from `allocate`, must not be read or written before `closing_barrier`. A wire whose
        reduction needs no closing barrier does the whole of `reduce`.
        """
        self.reduce(reduction, roots, total)

    def closing_barrier(self) -> bool:
        """Collective. Closes the reduction that `reduce_unclosed` has left open. Returns whether one was open.

        If so, every worker has called this when it returns, and holds the sum; the cost is one signal to each peer. If
        not, it sends nothing. Called by the thread that waits for the step, when the wire's queue is idle. Every other
        collective closes an open reduction before it begins.
        """
        return False

    def reduce_scatter(
        self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor, slices: Slices
    ) -> None:
        """Collective. Afterwards worker r has in `total[slices[r]]` the bits that `reduce` would give there.

        Elsewhere `total` is undefined. `roots` and `total` are as in `reduce`, `slices` the same on all workers. A wire
        without a cheaper way does the whole reduction.
        """
        check_slices(slices, total.numel(), len(reduction.folds))
        self.reduce(reduction, roots, total)

    def all_gather(self, total: torch.Tensor, slices: Slices) -> None:
        """Collective. Before, worker r has its slice in `total[slices[r]]`; afterwards `total` holds every slice."""

    def synchronize(self) -> None:
        """Waits until this worker's device has done all reductions so far; raises PeerGone if a loss ended them.

        Sends no message. On a CPU they are done already. One thread at a time.
        """
        return

    def awaited(self) -> list[int]:
        """The workers for which a collective waits now; `Transport.awaited` has those of messages. Any thread."""
        return []

    def close(self) -> None:
        """Frees what it holds. A collective that waits on another thread fails. May be called twice."""


def check_slices(slices: Slices, num_elements: int, num_workers: int) -> None:
    """Raises unless there is one slice for each worker and they cover all elements without overlap."""
    pairs = sorted((part.start, part.stop) for part in slices if part)
    bounds = [0, *chain.from_iterable(pairs), num_elements]  # each slice begins where the one before it ends
    fits = all(part.step == 1 for part in slices) and bounds[::2] == bounds[1::2]
    if not fits or len(slices) != num_workers:
        raise BadArgument(
            f"slices must be {num_workers} ranges, one for each worker, that cover {num_elements} elements without "
            f"overlap, not {list(slices)}"
        )
