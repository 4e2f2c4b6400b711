"""The additions of a slice: compiled or by torch, the same bits as the tree written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.lanes import Assignment, Branch, Root, Tree, leaves, reduction
from lockstep.wire.shared import kernels
from lockstep.wire.shared.kernels import has_llvm, summation

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64]


def _tree(num_workers: int) -> Tree:
    return reduction(Assignment.even(num_workers, num_workers), tuple(range(num_workers))).tree


def _written_out(tree: Tree, values: dict[Root, torch.Tensor]) -> torch.Tensor:
    if isinstance(tree, Branch):
        return _written_out(tree.left, values) + _written_out(tree.right, values)
    assert isinstance(tree, Root)
    return values[tree]


def _values(tree: Tree, num_elements: int, dtype: torch.dtype) -> dict[Root, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_elements)
    roots = [leaf for leaf in leaves(tree) if isinstance(leaf, Root)]
    return {root: (torch.randn(num_elements, generator=generator) * 1000).to(dtype) for root in roots}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 16])
def test_the_sum_has_the_bits_of_the_tree_in_every_place(num_workers: int, dtype: torch.dtype, compiled: bool) -> None:
    tree = _tree(num_workers)
    values = _values(tree, 70_001, dtype)
    expected = _written_out(tree, values).clone()
    places = [values[Root(0, 0)], *(torch.zeros(70_001, dtype=dtype) for _ in range(num_workers - 1))]
    summation(tree, values, places, compiled=compiled)()
    assert all(torch.equal(place, expected) for place in places)


@given(num_elements=st.integers(1, 600), num_workers=st.integers(1, 9), alike=st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_length_and_start_is_added_and_nothing_beyond_is_touched(
    num_elements: int, num_workers: int, alike: bool
) -> None:
    tree = _tree(num_workers)
    whole = _values(tree, num_elements + 8, torch.float32)
    start = 1 if alike else 3  # not on a vector's boundary
    span = slice(start, start + num_elements)
    values = {root: value[span] for root, value in whole.items()}
    expected = _written_out(tree, values).clone()
    before = {root: value.clone() for root, value in whole.items()}
    summation(tree, values, [values[Root(rank, 0)] for rank in range(num_workers)])()
    for root, value in whole.items():
        assert torch.equal(value[span], expected)
        assert torch.equal(value[: span.start], before[root][: span.start])
        assert torch.equal(value[span.stop :], before[root][span.stop :])


def test_other_brackets_give_other_bits() -> None:
    """The values can tell brackets apart, so that the tests above can fail."""
    tree = _tree(4)
    values = _values(tree, 70_001, torch.float32)
    chain = Branch(Branch(Branch(Root(0, 0), Root(1, 0)), Root(2, 0)), Root(3, 0))
    assert not torch.equal(_written_out(tree, values), _written_out(chain, values))


def test_infinities_and_nans_and_negative_zeros_are_added_as_torch_does() -> None:
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 0.0, 1e-42, -1e-42, 3e38] * 40)
    tree = _tree(2)
    for shift in range(8):
        values = {Root(0, 0): odd.clone(), Root(1, 0): odd.roll(shift)}
        expected = values[Root(0, 0)] + values[Root(1, 0)]
        place = torch.empty_like(odd)
        summation(tree, values, [place])()
        assert torch.equal(place.isnan(), expected.isnan())
        known = ~expected.isnan()
        assert torch.equal(place.view(torch.int32)[known], expected.view(torch.int32)[known])


def test_without_llvm_torch_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_llvm", lambda: False)
    monkeypatch.setattr(kernels, "_compiled", lambda *_: pytest.fail("compiled without llvm"))
    values = {Root(0, 0): torch.ones(10), Root(1, 0): torch.ones(10)}
    summation(_tree(2), values, [values[Root(0, 0)]])()
    assert values[Root(0, 0)].tolist() == [2.0] * 10


def test_the_tested_versions_include_llvm() -> None:
    assert has_llvm()
