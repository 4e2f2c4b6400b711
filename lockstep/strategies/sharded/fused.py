"""Optimizers that make an update by one kernel, which is given one batch of chunks after the other.

# Note [One call, many batches]
# A call of `optimizer.step` takes longer than the update of a batch that fits into a cache. A fused optimizer makes its
# update by one kernel, which takes lists of tensors, one tensor after the other. So all batches enter the optimizer at
# once, its `step` is called once, and the call of the kernel is divided: the journal of a batch is written, then the
# kernel updates that batch while it is in the cache. The kernel is the optimizer's own, and so are the bits.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

KERNELS = tuple(getattr(torch.ops.aten, f"_fused_{name}_") for name in ("sgd", "adam", "adamw", "adagrad"))
"""Each takes the parameters as its first list; its other lists are as long, or empty."""

_CLASSES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether one of KERNELS makes the updates of all its groups."""
    return type(optimizer) in _CLASSES and all(group.get("fused") for group in optimizer.param_groups)


class KernelByBatches(TorchDispatchMode):
    """While it is entered, a call of one of KERNELS is divided. See Note [One call, many batches].

    `batch_of` gives the number of a tensor's batch by the tensor's id. `updating` stands around the update of a batch.
    """

    def __init__(self, batch_of: Mapping[int, int], updating: Callable[[int], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._batch_of, self._updating = batch_of, updating

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func.overloadpacket not in KERNELS:  # a rate that is a tensor has an overload of its own
            return func(*args, **options)
        for number, part in self._parts(args[0]):
            with self._updating(number):
                func(*(column[part] for column in args), **options)
        return None

    def _parts(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, slice]]:
        """The batches in the order of the tensors, and where the tensors of each stand."""
        parts, begin = [], 0
        for number, members in groupby(self._batch_of[id(tensor)] for tensor in tensors):
            end = begin + len(list(members))
            parts.append((number, slice(begin, end)))
            begin = end
        return parts
