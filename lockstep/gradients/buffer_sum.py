"""Buffers of all lanes in one sum: statistics are averaged, counters take the values of the lowest lane.

# Note [Counters in the sum]
# Counters, masks and other buffers that are not averaged take the values of the lowest lane. They are not sent for
# that: they go with the statistics through the sum that averages these, 16 bits in each float32, which is exact, and
# all other lanes add zeros. So there is one exchange less, and no value is read: on a GPU that would make the host wait
# for all of the lanes.

# Note [Many small buffers]
# A network may have hundreds of statistics of a few numbers each. On a GPU a copy of one costs as much as a copy of
# all, so they are copied together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

NUMBERS = torch.float32
"""Holds every integer of 16 bits, and zero added to it changes nothing."""


@dataclass
class BufferGroup:
    """Buffers, by number, that go through one sum: of one dtype and device, and counters with float32 ones."""

    averaged: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)

    def lane_part(
        self, starts: Sequence[torch.Tensor], written: Mapping[int, torch.Tensor], weight: float, *, is_lowest: bool
    ) -> torch.Tensor:
        """A lane's part of the sum: the statistics, weighted, and the counters, if the lane is the lowest.

        `written` are the buffers that the lane has written to; the others have the values of `starts`.
        """
        parts = []
        if self.averaged:
            parts.append(_flatten([written.get(index, starts[index]) for index in self.averaged]).mul_(weight))
        if self.counted:
            counters = [written.get(index, starts[index]) for index in self.counted]
            parts.append(as_numbers(counters) if is_lowest else _zeros_like_numbers(counters))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def write(self, total: torch.Tensor, buffers: Sequence[torch.Tensor]) -> None:
        """The sum over all lanes stands in the buffers."""
        averaged = [buffers[index] for index in self.averaged]
        counted = [buffers[index] for index in self.counted]
        num_averaged = sum(buffer.numel() for buffer in averaged)
        if averaged:
            copy_together(averaged, _unflatten(total[:num_averaged], averaged))
        if counted:
            copy_together(counted, from_numbers(total[num_averaged:], counted))


def buffer_groups(starts: Sequence[torch.Tensor], changed: Sequence[bool]) -> list[BufferGroup]:
    """The buffers that have changed in some lane: the same on all workers, in the same order."""
    groups: dict[tuple[torch.device, torch.dtype], BufferGroup] = {}
    for index, value in enumerate(starts):
        if changed[index]:
            is_averaged = value.is_floating_point() or value.is_complex()
            group = groups.setdefault((value.device, value.dtype if is_averaged else NUMBERS), BufferGroup())
            (group.averaged if is_averaged else group.counted).append(index)
    return list(groups.values())


def as_numbers(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor of numbers. Inverse of `from_numbers`."""
    whole = torch.cat([_flatten([values[i] for i in group]).view(torch.uint8) for group in _by_width(values)])
    if whole.numel() % 2:
        whole = torch.cat([whole, whole.new_zeros(1)])
    return whole.view(torch.int16).to(NUMBERS)


def from_numbers(numbers: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that `numbers` were made of, with shapes and dtypes `like` theirs."""
    whole = numbers.to(torch.int16).view(torch.uint8)
    found: dict[int, torch.Tensor] = {}
    for group in _by_width(like):
        num_bytes = sum(like[i].nbytes for i in group)
        pieces = _unflatten(whole[:num_bytes].view(like[group[0]].dtype), [like[i] for i in group])
        found.update(zip(group, pieces, strict=True))
        whole = whole[num_bytes:]
    return [found[i] for i in range(len(like))]


def count_numbers(values: Sequence[torch.Tensor]) -> int:
    """How many numbers `as_numbers` makes of them."""
    return (sum(value.nbytes for value in values) + 1) // 2


def copy_together(places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """See Note [Many small buffers]. Those of one dtype are one kernel."""
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for place, value in zip(places, values, strict=True):
        into, out_of = by_dtype.setdefault(place.dtype, ([], []))
        into.append(place)
        out_of.append(value)
    for into, out_of in by_dtype.values():
        torch._foreach_copy_(into, out_of)


def _zeros_like_numbers(counters: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.zeros(count_numbers(counters), dtype=NUMBERS, device=counters[0].device)


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor; many small ones cost one call."""
    whole: torch.Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return whole


def _unflatten(whole: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Its parts, as views with shapes `like` these."""
    views: Sequence[torch.Tensor] = _unflatten_dense_tensors(whole, like)  # type: ignore[no-untyped-call]
    return views


def _by_width(values: Sequence[torch.Tensor]) -> list[list[int]]:
    """Which values have the same dtype. Wide ones come first: so all are aligned."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, value in enumerate(values):
        by_dtype.setdefault(value.dtype, []).append(index)
    return [by_dtype[dtype] for dtype in sorted(by_dtype, key=lambda dtype: -dtype.itemsize)]
