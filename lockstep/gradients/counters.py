"""Buffers that are not averaged (counters, masks) as numbers that can go through a sum.

# Note [Counters in the sum]
# Counters take the values of the lowest lane. They are not sent for that: they go with the statistics through the sum
# that averages these, 16 bits in each float32, which is exact, and all other lanes add zeros. So there is one exchange
# less, and nobody looks at a value: on a GPU that would make the host wait for all of the lanes.
"""

from collections.abc import Sequence

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

NUMBERS = torch.float32
"""Holds every integer of 16 bits, and zero added to it changes nothing."""


def as_numbers(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor of numbers. Inverse of `from_numbers`."""
    whole = torch.cat([flatten([values[i] for i in group]).view(torch.uint8) for group in _groups(values)])
    if whole.numel() % 2:
        whole = torch.cat([whole, whole.new_zeros(1)])
    return whole.view(torch.int16).to(NUMBERS)


def from_numbers(numbers: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that `numbers` were made of, with shapes and dtypes `like` theirs."""
    whole = numbers.to(torch.int16).view(torch.uint8)
    found: dict[int, torch.Tensor] = {}
    for group in _groups(like):
        num_bytes = sum(like[i].nbytes for i in group)
        pieces = unflatten(whole[:num_bytes].view(like[group[0]].dtype), [like[i] for i in group])
        found.update(zip(group, pieces, strict=True))
        whole = whole[num_bytes:]
    return [found[i] for i in range(len(like))]


def count_numbers(values: Sequence[torch.Tensor]) -> int:
    """How many numbers `as_numbers` makes of them."""
    return (sum(value.nbytes for value in values) + 1) // 2


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor; many small ones cost one call."""
    whole: torch.Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return whole


def unflatten(whole: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Its parts, as views with shapes `like` these."""
    views: Sequence[torch.Tensor] = _unflatten_dense_tensors(whole, like)  # type: ignore[no-untyped-call]
    return views


def _groups(values: Sequence[torch.Tensor]) -> list[list[int]]:
    """Which values have the same dtype. Wide ones come first: so all are aligned."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, value in enumerate(values):
        by_dtype.setdefault(value.dtype, []).append(index)
    return [by_dtype[dtype] for dtype in sorted(by_dtype, key=lambda dtype: -dtype.itemsize)]
