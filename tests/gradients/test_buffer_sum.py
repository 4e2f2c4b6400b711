"""Counters as numbers: any bytes come back, also through a sum with zeros."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.gradients.buffer_sum import as_numbers, count_numbers, from_numbers

DTYPES = (torch.int64, torch.bool, torch.int32, torch.uint8, torch.int16, torch.int8)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    made = torch.empty(shape, dtype=torch.int64)
    bits = [draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(made.numel())]
    made = torch.tensor(bits, dtype=torch.int64).view(made.shape)
    made = made % 2 == 0 if dtype == torch.bool else made.to(dtype)
    return made.transpose(0, -1) if made.dim() > 1 and draw(st.booleans()) else made


@given(st.lists(tensors(), min_size=1, max_size=5))
def test_what_went_through_a_sum_with_zeros_has_the_same_bits(values: list[torch.Tensor]) -> None:
    numbers = as_numbers(values)
    assert numbers.dtype == torch.float32
    assert numbers.shape == (count_numbers(values),)
    for total in (numbers, torch.zeros_like(numbers) + numbers, numbers + torch.zeros_like(numbers)):
        found = from_numbers(total, values)
        for value, again in zip(values, found, strict=True):
            assert again.dtype == value.dtype
            assert torch.equal(again, value)


def test_every_pattern_of_sixteen_bits_comes_back() -> None:
    value = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = as_numbers([value])
    assert torch.equal(from_numbers(numbers + 0.0, [value])[0], value)
    assert not torch.signbit(numbers[numbers == 0]).any()
