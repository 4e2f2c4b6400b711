"""What a step needs of the wire: memory for its buckets, and their sum over all workers."""

from collections.abc import Sequence
from typing import Protocol

import torch

from lockstep.lanes import Reduction


class Reducer(Protocol):
    """Adds flat tensors over all workers, in the order of the lane tree."""

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor that suits `reduce` best. Any thread."""

    def release(self, tensor: torch.Tensor) -> None:
        """The tensor will not be reduced again; whoever still looks at it may. Any thread, between reductions."""

    def reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Collective. Afterwards `total` holds the sum of all workers' roots, the same bits on every worker.

        `roots` are flat tensors like `total`; they are used up. `total` may be `roots[0]` itself. One thread at a time.
        """

    def reduce_and_stay(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Like `reduce`, but `total`, which comes from `allocate`, may be looked at or changed only after `part`."""
        self.reduce(reduction, roots, total)

    def part(self) -> bool:
        """Collective. Whether workers had stayed together after the last reduction.

        If they had, all have been here when this returns, and hold its sum. If not, nobody was asked.
        """
        return False

    def awaited(self) -> list[int]:
        """As a transport's: the workers for whom this one waits now, besides those of messages. Any thread."""
        return []

    def close(self) -> None:
        """Frees what it holds. A `reduce` that waits on another thread fails. May be called twice."""
