"""Lanes folded onto a bucket, whatever its gradients' sizes: weighted, rounded, then added bracket by bracket."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.gradients.bucket_set import own_buckets
from lockstep.gradients.fold import PIECE, SMALL, fold_lane
from lockstep.gradients.layout import Spec, make_layout
from lockstep.lanes import Assignment, Fold, reduction
from lockstep.wire.open import in_process

SIZES = {
    "small": [3, 17, SMALL, 1, 64],
    "large": [3 * SMALL, 17, SMALL + 1],
    "one large among small": [3, 5 * SMALL + 3, 17],
    "in pieces": [PIECE + 7, 2 * PIECE],
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
LANES = 5


def gradients(sizes: Sequence[int], dtype: torch.dtype, lane: int) -> list[Tensor | None]:
    """With zeros of both signs and very small numbers; one that the lane does not reach."""
    generator = torch.Generator().manual_seed(lane)
    found: list[Tensor | None] = [torch.randn(size, dtype=dtype, generator=generator) for size in sizes]
    for gradient in found:
        assert gradient is not None
        gradient[:1] = -0.0
        gradient[1:3] *= 1e-38
    found[lane % len(sizes)] = None
    return found


def folded(sizes: Sequence[int], dtype: torch.dtype, weights: Sequence[float], fold: Fold) -> list[list[Tensor]]:
    """The roots that are left, each by parameter."""
    parameters = [Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    specs = [Spec.of(str(number), parameter) for number, parameter in enumerate(parameters)]
    (layout,) = make_layout(specs, 1 << 40, 1 << 40).buckets
    with in_process() as wire:
        buckets = own_buckets(wire, make_layout(specs, 1 << 40, 1 << 40), parameters)
        for lane, merges in zip(fold.lanes, fold.merges, strict=True):
            for parameter, gradient in zip(parameters, gradients(sizes, dtype, lane), strict=True):
                parameter.grad = gradient
            fold_lane(buckets, weights[lane], merges)
            assert all(parameter.grad is None for parameter in parameters)
        slots = sorted(range(len(sizes)), key=lambda number: layout.slots[number].index)
        return [[layout.cut(root)[slot].clone() for slot in slots] for root in buckets[0].roots()]


def expected(sizes: Sequence[int], dtype: torch.dtype, weights: Sequence[float], fold: Fold) -> list[list[Tensor]]:
    """By torch, one tensor after the other: what a lane did not reach is +0."""
    stack: list[list[Tensor]] = []
    for lane, merges in zip(fold.lanes, fold.merges, strict=True):
        pairs = zip(gradients(sizes, dtype, lane), sizes, strict=True)
        stack.append([torch.zeros(size, dtype=dtype) if one is None else one.mul(weights[lane]) for one, size in pairs])
        for _ in range(merges):
            upper = stack.pop()
            stack[-1] = [one.add(other) for one, other in zip(stack[-1], upper, strict=True)]
    return stack


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("weights", [[1 / 3, 0.1, 0.25, 0.2, 0.7], [1.0] * LANES], ids=["weighted", "as they are"])
def test_lanes_are_weighted_rounded_and_added_in_their_brackets(
    sizes: list[int], dtype: torch.dtype, weights: list[float]
) -> None:
    for num_workers in (1, 2):
        fold = reduction(Assignment.even(LANES, num_workers), tuple(range(LANES))).folds[0]
        found = folded(sizes, dtype, weights, fold)
        wanted = expected(sizes, dtype, weights, fold)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


def bits(tensor: Tensor) -> Tensor:
    """To be compared: -0 is not +0."""
    return tensor.contiguous().view(torch.uint8)


def test_a_gradient_of_the_script_stays_as_it_is() -> None:
    for sizes in SIZES.values():
        parameters = [Parameter(torch.zeros(size)) for size in sizes]
        given = [torch.randn(size) for size in sizes]
        before = [one.clone() for one in given]
        with in_process() as wire:
            layout = make_layout([Spec.of(str(n), parameter) for n, parameter in enumerate(parameters)])
            buckets = own_buckets(wire, layout, parameters)
            for merges in (0, 1):
                for parameter, gradient in zip(parameters, given, strict=True):
                    parameter.grad = gradient
                fold_lane(buckets, 0.3, merges)
        assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))
