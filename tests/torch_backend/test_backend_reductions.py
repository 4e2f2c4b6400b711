"""Every reduction of every dtype is what Gloo computes, or, where Gloo cannot, what a loop over the members does."""

from functools import reduce as fold

import pytest
import torch
import torch.distributed as dist
from groups import joined
from workers import on_workers

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
LOOPS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
SIZES = (0, 1, 7, 20_011)
"""No element, fewer than members, one meeting for all, and slices."""

IMPOSSIBLE = {
    *((name, dtype) for name in ("BAND", "BOR", "BXOR") for dtype in (*FLOATS, *COMPLEX)),
    *(("AVG", dtype) for dtype in WHOLES),
    *((name, dtype) for name in ("MIN", "MAX") for dtype in COMPLEX),
}


def sample(rank: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers, so that every order of additions gives the same bits in every dtype."""
    numbers = (torch.arange(num_elements) * (rank + 3)) % 4
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers.double() + rank) % 3).to(dtype)
    return numbers.to(dtype)


def looped(name: str, size: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    total = fold(LOOPS[name], [sample(rank, num_elements, dtype) for rank in range(size)])
    return total / size if name == "AVG" else total


def asked(name: str) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, name)
    options.asyncOp = False
    return options


def _compare_with_loops() -> int:
    compared = 0
    with joined() as group:
        for dtype in (*FLOATS, *WHOLES, *COMPLEX):
            for name in LOOPS:
                if (name, dtype) in IMPOSSIBLE:
                    continue
                for num_elements in SIZES:
                    tensor = sample(group.rank, num_elements, dtype)
                    dist.group.WORLD.allreduce([tensor], asked(name)).wait()
                    expected = looped(name, group.size, num_elements, dtype)
                    assert torch.equal(tensor, expected), (name, dtype, num_elements)
                    compared += 1
    return compared


@pytest.mark.parametrize("num_workers", [1, 2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_every_reduction_of_every_dtype_is_that_of_a_loop_over_the_members(num_workers: int) -> None:
    expected = (len(LOOPS) * (len(FLOATS) + len(WHOLES) + len(COMPLEX)) - len(IMPOSSIBLE)) * len(SIZES)
    assert on_workers(num_workers, _compare_with_loops) == [expected] * num_workers


def _compare_with_gloo() -> list[str]:
    compared = []
    with joined() as group:
        gloo = dist.new_group(backend="gloo")
        for dtype in (*FLOATS, *WHOLES):
            for name in LOOPS:
                ours, theirs = sample(group.rank, 1003, dtype), sample(group.rank, 1003, dtype)
                try:
                    dist.all_reduce(theirs, getattr(dist.ReduceOp, name), group=gloo)
                except RuntimeError:
                    continue  # Gloo knows fewer
                if (name, dtype) in IMPOSSIBLE:
                    continue
                dist.all_reduce(ours, getattr(dist.ReduceOp, name))
                assert torch.equal(ours, theirs), (name, dtype)
                compared.append(f"{name} {dtype}")
    return compared


@pytest.mark.parametrize("num_workers", [2, 3])
def test_what_gloo_can_reduce_is_reduced_to_the_same(num_workers: int) -> None:
    compared = on_workers(num_workers, _compare_with_gloo)[0]
    assert {"SUM torch.float32", "MAX torch.int64", "SUM torch.float16", "PRODUCT torch.uint8"} <= set(compared)


def _refusals() -> list[str]:
    with joined():
        result = []
        for name, dtype in sorted(IMPOSSIBLE, key=str):
            with pytest.raises(ValueError, match="is not defined for") as error:
                dist.group.WORLD.allreduce([sample(0, 5, dtype)], asked(name)).wait()
            result.append(str(error.value))
        dist.all_reduce(value := torch.ones(1))
        assert value.item() == 2
        return result


def test_a_reduction_that_makes_no_sense_is_refused_by_name_and_the_group_goes_on() -> None:
    for result in on_workers(2, _refusals):
        assert result[0] == (
            "all_reduce on worker 0: AVG is not defined for bool. Nothing was exchanged, and the group can be used on."
        )


def _premul_sum() -> str:
    with joined():
        with pytest.raises(ValueError, match="PREMUL_SUM") as error:
            dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(2.0))
        return str(error.value)


def test_a_sum_with_factors_is_refused_with_what_there_is() -> None:
    result = on_workers(2, _premul_sum)[0]
    known = "SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR"
    assert f"the reduction PREMUL_SUM is not known here; known are {known}" in result


def _same_bits() -> bool:
    with joined() as group:
        chance = torch.Generator().manual_seed(group.rank)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for num_elements in (1000, 50_000):
                mine = torch.randn(num_elements, generator=chance).to(dtype)
                dist.all_reduce(mine)
                everyone = [torch.empty_like(mine) for _ in range(group.size)]
                dist.all_gather(everyone, mine)
                if not all(torch.equal(mine.view(torch.uint8), other.view(torch.uint8)) for other in everyone):
                    return False
        return True


def test_a_sum_has_the_same_bits_on_every_rank() -> None:
    assert on_workers(3, _same_bits) == [True] * 3


def _long() -> list[float]:
    num_elements = 5 * 2**20 // 2 + 13  # three chunks
    with joined() as group:
        for dtype in (torch.float32, torch.int16):
            tensor = (torch.arange(num_elements) % 1000 + group.rank).to(dtype)
            expected = (torch.arange(num_elements) % 1000 * group.size + sum(range(group.size))).to(dtype)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, expected)
        return [float(tensor.sum())]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_tensor_of_several_chunks_is_reduced_whole(num_workers: int) -> None:
    on_workers(num_workers, _long)


def _reduce_to_root() -> list[list[float]]:
    with joined() as group:
        found = []
        for num_elements in (3, 20_000):
            tensor = torch.full((num_elements,), float(group.rank + 1))
            dist.reduce(tensor, dst=1)
            found.append([tensor.min().item(), tensor.max().item()])
        return found


def test_reduce_writes_the_sum_on_the_root_and_leaves_the_others_alone() -> None:
    assert on_workers(3, _reduce_to_root) == [[[1, 1]] * 2, [[6, 6]] * 2, [[3, 3]] * 2]


def _reduce_scatters() -> None:
    with joined() as group:
        for num_elements in (1, 5, 9000, 1_500_000):
            parts = [sample(group.rank + part, num_elements, torch.float32) for part in range(group.size)]
            expected = sum(sample(rank + group.rank, num_elements, torch.float32) for rank in range(group.size))
            listed, single = torch.empty(num_elements), torch.empty(num_elements)
            dist.reduce_scatter(listed, parts)
            dist.reduce_scatter_tensor(single, torch.cat(parts))
            assert torch.equal(listed, expected)
            assert torch.equal(single, expected)
            dist.reduce_scatter_tensor(single, torch.cat(parts), dist.ReduceOp.AVG)
            assert torch.equal(single, expected / group.size)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_reduce_scatter_gives_each_rank_the_sum_of_its_parts(num_workers: int) -> None:
    on_workers(num_workers, _reduce_scatters)


def _coalesced() -> None:
    with joined() as group:
        tensors = [torch.full((3, 2), float(group.rank)), torch.full((5,), group.rank + 1), torch.ones(0)]
        options = dist.AllreduceCoalescedOptions()
        dist.group.WORLD.allreduce_coalesced(tensors, options).wait()
        total = sum(range(group.size))
        assert torch.equal(tensors[0], torch.full((3, 2), float(total)))
        assert torch.equal(tensors[1], torch.full((5,), total + group.size))
        outputs = [torch.empty(2), torch.empty(3, dtype=torch.int32)]
        inputs = [torch.arange(2.0 * group.size), torch.arange(3 * group.size, dtype=torch.int32)]
        dist.group.WORLD.reduce_scatter_tensor_coalesced(outputs, inputs, dist.ReduceScatterOptions()).wait()
        assert torch.equal(outputs[0], inputs[0].view(group.size, 2)[group.rank] * group.size)
        assert torch.equal(outputs[1], inputs[1].view(group.size, 3)[group.rank] * group.size)


def test_lists_of_tensors_of_several_dtypes_are_reduced_together() -> None:
    on_workers(3, _coalesced)
