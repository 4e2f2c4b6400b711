"""A mark is another one after whatever a script may do to a parameter."""

from collections.abc import Callable

import pytest
import torch

from lockstep.strategies.sharded.marks import BLOCK_BYTES, marks


def _tensors() -> list[torch.Tensor]:
    """Small and large, of several sizes of element, one that is not contiguous, and one without elements."""
    chance = torch.Generator().manual_seed(2)
    sizes = (3, 1000, BLOCK_BYTES // 4 + 5, 7, 4 * BLOCK_BYTES // 4)
    plain = [torch.randn(size, generator=chance) for size in sizes]
    half = [torch.randn(size, generator=chance).bfloat16() for size in (5, BLOCK_BYTES - 1)]
    return [*plain, *half, torch.empty(0), torch.randn(3, 4, generator=chance).t()]


def test_a_mark_is_that_of_a_tensor_alone_whatever_others_are_marked_with_it() -> None:
    tensors = _tensors()
    together = marks(tensors)
    assert together.tolist() == [int(marks([one])) for one in tensors]
    assert together[:3].tolist() == marks(tensors[:3]).tolist()
    assert len(set(together.tolist())) == len(tensors)


def _swapped(one: torch.Tensor, other: int) -> None:
    one[[0, other]] = one[[other, 0]]


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize(
    "change",
    [
        lambda one: _swapped(one, 1),
        lambda one: _swapped(one, -1),  # in another block, if it is large
        lambda one: one.neg_(),
        lambda one: one[:2].neg_(),
        lambda one: one.mul_(0.5),
        lambda one: one.clamp_(-0.1, 0.1),
        lambda one: one.copy_(one.flip(0)),
    ],
)
def test_whatever_a_script_does_to_a_tensor_it_has_another_mark(
    change: Callable[[torch.Tensor], object], number: int
) -> None:
    tensor = _tensors()[number]
    before = int(marks([tensor]))
    change(tensor)
    assert int(marks([tensor])) != before
