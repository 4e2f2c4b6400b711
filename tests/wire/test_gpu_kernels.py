"""The kernel that adds a slice on a GPU: what is decided without one, and, where there is one, what it computes."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lockstep.determinism.attention import deterministic_attention
from lockstep.determinism.process import settle_process
from lockstep.lanes import Assignment, Branch, Root, Tree, reduction
from lockstep.wire.cuda.kernels import VECTOR_BYTES, Slice, _by_torch, aligned_slices, source, summation
from lockstep.world import World

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@given(st.integers(0, 10_000), st.integers(1, 17), st.sampled_from([1, 2, 4, 8, 16]))
def test_slices_cover_a_bucket_once_and_begin_where_vectors_do(elements: int, parts: int, element_bytes: int) -> None:
    slices = aligned_slices(elements, parts, element_bytes)
    assert len(slices) == parts
    assert [number for part in slices for number in part] == list(range(elements))
    assert all(part.start * element_bytes % VECTOR_BYTES == 0 for part in slices if len(part))


@given(st.integers(1, 1000), st.integers(1, 9))
def test_slices_are_alike_but_for_the_last_ones_and_no_vector_too_long(elements: int, parts: int) -> None:
    """As those of a bucket that is padded for an all-to-all."""
    lengths = [len(part) for part in aligned_slices(4 * elements, parts, 4)]
    assert lengths[0] < 4 * elements / parts + 4
    assert lengths == [min(lengths[0], max(0, 4 * elements - lengths[0] * number)) for number in range(parts)]


def test_the_source_has_the_brackets_of_the_tree() -> None:
    tree = Branch(Branch(0, 1), Branch(2, 3))
    assert "((in0[at] + in1[at]) + (in2[at] + in3[at]))" in source(tree, torch.float32, 1)


def test_half_precision_is_rounded_at_every_bracket() -> None:
    text = source(Branch(Branch(0, 1), 2), torch.bfloat16, 2)
    inner = "to_bfloat16((from_bfloat16(in0[at]) + from_bfloat16(in1[at])))"
    assert f"to_bfloat16((from_bfloat16({inner}) + from_bfloat16(in2[at])))" in text


def by_hand(tree: Tree, roots: dict[Root, torch.Tensor]) -> torch.Tensor:
    if isinstance(tree, Branch):
        return by_hand(tree.left, roots) + by_hand(tree.right, roots)
    assert isinstance(tree, Root)
    return roots[tree]


def random_roots(tree_of: int, elements: int, dtype: torch.dtype) -> tuple[Tree, dict[Root, torch.Tensor]]:
    whole = reduction(Assignment.even(tree_of, tree_of), tuple(range(tree_of)))
    generator = torch.Generator().manual_seed(elements)
    return whole.tree, {
        Root(rank, 0): (100 * torch.randn(elements, generator=generator, dtype=torch.float64)).to(dtype).cuda()
        for rank in range(tree_of)
    }


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "by torch"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_roots", [1, 2, 3, 8, 13])
def test_a_slice_is_added_bracket_by_bracket_and_written_everywhere(
    num_roots: int, dtype: torch.dtype, compiled: bool
) -> None:
    for elements in (1, 5, 64, 4099):
        tree, roots = random_roots(num_roots, elements, dtype)
        wanted = by_hand(tree, roots)
        places = [torch.full((elements,), 7, dtype=dtype, device="cuda") for _ in range(3)]
        what = Slice(elements, dtype, places[0].device)
        make = summation if compiled else _by_torch
        addresses = {root: value.data_ptr() for root, value in roots.items()}
        work = make(tree, addresses, [place.data_ptr() for place in places], what)
        work(torch.cuda.current_stream().cuda_stream)
        assert all(torch.equal(place, wanted) for place in places)


@pytest.mark.cuda
@pytest.mark.parametrize("exact", [True, False])
def test_nccl_with_one_rank_gives_the_sum_of_its_roots(exact: bool) -> None:
    from lockstep.wire import over_nccl

    whole = reduction(Assignment.even(1, 1), (0,))
    device = torch.device("cuda", 0)
    with over_nccl(World(generation=1), dist.HashStore(), 20.0, device, exact=exact) as wire:
        value = wire.reducer.allocate(1001, torch.float32, device)
        value.copy_(torch.arange(1001.0))
        wire.sequence.submit(lambda: wire.reducer.reduce(whole, [value], value)).result()
        wire.reducer.synchronize()
        assert torch.equal(value.cpu(), torch.arange(1001.0))


@pytest.mark.cuda
def test_attention_gives_the_same_gradient_every_time_although_others_are_only_warned_about() -> None:
    shapes = [torch.randn(4, 8, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

    def gradient() -> torch.Tensor:
        q, k, v = (x.clone().requires_grad_() for x in shapes[:3])
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(shapes[3])
        assert q.grad is not None
        return q.grad

    own = F.scaled_dot_product_attention
    with settle_process(1, exact=True, device=torch.device("cuda", 0)):
        first = gradient()
        assert all(torch.equal(first, gradient()) for _ in range(20))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert F.scaled_dot_product_attention is own


def test_attention_on_the_cpu_is_left_alone() -> None:
    with deterministic_attention(torch.device("cpu")):
        q = torch.randn(1, 1, 4, 8, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert q.grad is not None
