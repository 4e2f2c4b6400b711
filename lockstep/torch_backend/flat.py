"""Tensors of any layout as flat memory, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class FlatTensor:
    """A tensor's elements in a row: `elements` is the tensor's own memory where it can be, else a copy."""

    tensor: torch.Tensor
    elements: torch.Tensor

    def finish(self) -> None:
        """Copies `elements` back to the tensor, if they are a copy."""
        if self.elements.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(self.elements.view(self.tensor.shape))


def flat(tensor: torch.Tensor) -> FlatTensor:
    """Elements in the order of the indices.

    Autograd does not record writes to them, as with other backends: with `detach` they would count as a change.
    """
    plain = tensor.data
    return FlatTensor(plain, plain.resolve_conj().resolve_neg().contiguous().view(-1))


@dataclass(frozen=True)
class Row:
    """Several tensors of one dtype, copied into one row of `elements`."""

    elements: torch.Tensor
    flats: tuple[FlatTensor, ...]

    def finish(self) -> None:
        for part in self.flats:
            part.finish()


def row(tensors: Sequence[torch.Tensor]) -> Row:
    elements = torch.cat([flat(tensor).elements for tensor in tensors])
    parts = elements.split([tensor.numel() for tensor in tensors])
    return Row(elements, tuple(FlatTensor(tensor.data, part) for tensor, part in zip(tensors, parts, strict=True)))


TensorSpan = tuple[int, int, int]
"""Which tensor, its first element, and how many elements."""


@dataclass(frozen=True)
class MemberParts:
    """The part for each member, or from each: a place in one of the tensors."""

    tensors: tuple[torch.Tensor, ...]
    places: tuple[TensorSpan, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, _, size in self.places)

    def copied(self) -> "MemberParts":
        return MemberParts(tuple(tensor.data.clone() for tensor in self.tensors), self.places)

    def open(self) -> "FlatParts":
        """Called when the operation begins, after earlier operations have written to the tensors."""
        return FlatParts([flat(tensor) for tensor in self.tensors], self.places)


class FlatParts:
    """The same as memory: `of[member]` is flat."""

    def __init__(self, flats: list[FlatTensor], places: tuple[TensorSpan, ...]) -> None:
        self._flats = flats
        self.of = [flats[index].elements[start : start + size] if size else _NOTHING for index, start, size in places]

    def finish(self) -> None:
        """Copies what was written to the parts back to the tensors."""
        for written in self._flats:
            written.finish()


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the default device is


def each(tensors: Sequence[torch.Tensor]) -> MemberParts:
    """A tensor for each member."""
    return MemberParts(tuple(tensors), tuple((index, 0, tensor.numel()) for index, tensor in enumerate(tensors)))


def cut(tensor: torch.Tensor, sizes: Sequence[int]) -> MemberParts:
    """One tensor, so many elements of it for each member, one after the other."""
    starts = accumulate(sizes[:-1], initial=0)
    return MemberParts((tensor,), tuple((0, start, size) for start, size in zip(starts, sizes, strict=True)))


def whole(tensor: torch.Tensor, members: Sequence[bool]) -> MemberParts:
    """The whole tensor for each member that takes it."""
    return MemberParts((tensor,), tuple((0, 0, tensor.numel() if takes else 0) for takes in members))


def nothing(num_members: int) -> MemberParts:
    return MemberParts((), ((0, 0, 0),) * num_members)
