"""The reducer of `exact=False`: the process group's own all-reduce adds the buckets."""

from collections.abc import Sequence

import torch

from lockstep.errors import BadArgument
from lockstep.lanes import Reduction
from lockstep.wire.network.gloo import GlooTransport
from lockstep.wire.reducer import Reducer, Slices
from lockstep.wire.schedules.executor import Executor

ADDED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
"""The dtypes that every backend adds. Others they refuse, or add wrongly (bool)."""


class NativeAllReduce(Reducer):
    """A Reducer that leaves the sum to the backend: one all-reduce for each bucket.

    It does not keep the brackets. The backend adds in an order that depends on the number of workers, and with some
    backends on the size of the bucket and the network, so other numbers of workers, or another assignment, give other
    last bits. Each lane still counts once, and all workers receive the same bits where the backend adds each element in
    one place, as Gloo's ring does. A worker without lanes adds zeros.

    Cost: one addition for each root but the first, then the backend's all-reduce of P bytes, however many roots there
    are: 2·(W-1)/W·P bytes from each worker if it is a ring.
    """

    def __init__(self, transport: GlooTransport) -> None:
        self._transport = transport
        self._executor = Executor(transport)

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, device=device)

    def release(self, tensor: torch.Tensor) -> None:
        pass

    def close(self) -> None:
        """Frees the scratch memory. The owner of the transport closes that."""
        self._executor.close()

    def reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Collective. Afterwards `total` holds the sum of all workers' roots, up to rounding.

        A reduce-scatter does the whole of it: the order of additions stays that of the all-reduce.
        """
        refuse_unless_added(total.dtype)
        if total.numel() == 0:
            return
        add_up(roots, total)
        self._transport.all_reduce(total)

    def all_gather(self, total: torch.Tensor, slices: Slices) -> None:
        """Collective. By messages: every worker sends its slice to every other."""
        self._executor.all_gather(total, slices)


def refuse_unless_added(dtype: torch.dtype) -> None:
    """Raises for a dtype that not every backend adds."""
    if dtype not in ADDED:
        names = ", ".join(str(known).removeprefix("torch.") for known in ADDED)
        raise BadArgument(f"exact=False adds {names}, not {str(dtype).removeprefix('torch.')}")


def add_up(roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Writes the sum of this worker's roots to `total`, which may be the first of them."""
    if not roots:
        total.zero_()
    elif roots[0].data_ptr() != total.data_ptr():
        total.copy_(roots[0])
    for root in roots[1:]:
        total.add_(root)
