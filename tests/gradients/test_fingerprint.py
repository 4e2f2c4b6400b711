"""Fingerprints of a replica's state: every flipped bit shows, and the odd worker is found."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import BadArgument
from lockstep.gradients.fingerprint import MOST_PARTS, WORDS_PER_PART, Drift, combined, fingerprints, odd_ones

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
OFFSET_OF_THE_FIRST_PLACE = 0x9E3779B97F4A7C15 - 2**64
LAYOUTS = ["a scalar", "contiguous", "transposed", "every other", "one element into its storage"]


def laid_out(layout: str, dtype: torch.dtype) -> torch.Tensor:
    """A small tensor of random bits, or valid truth values, in its own storage."""
    source = torch.Generator().manual_seed(7)
    high = 2 if dtype == torch.bool else 256
    bits = torch.randint(0, high, (16 * dtype.itemsize,), dtype=torch.uint8, generator=source).view(dtype)
    return {
        "a scalar": bits[0],
        "contiguous": bits[:7],
        "transposed": bits[:6].view(2, 3).t(),
        "every other": bits[1:14:2],
        "one element into its storage": bits[1:6],
    }[layout]


def positions(tensor: torch.Tensor) -> list[int]:
    """Where each byte of the tensor's elements lies in its storage."""
    elements = torch.arange(tensor.untyped_storage().nbytes() // tensor.itemsize)
    used = elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist()
    return [element * tensor.itemsize + byte for element in used for byte in range(tensor.itemsize)]


def flip(tensor: torch.Tensor, byte: int, bit: int) -> None:
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    memory[byte] ^= 1 << bit


def entry(value: object) -> int:
    return int(fingerprints({"it": value})[0])


def words(num_words: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (num_words,), generator=torch.Generator().manual_seed(num_words))


def vector(*entries: int) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.int64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_flipped_bit_of_a_small_tensor_changes_its_entry(dtype: torch.dtype, layout: str) -> None:
    tensor = laid_out(layout, dtype)
    before = entry(tensor)
    for byte in positions(tensor):
        for bit in range(8):
            flip(tensor, byte, bit)
            assert entry(tensor) != before
            flip(tensor, byte, bit)


@settings(max_examples=50)
@given(st.integers(1, 2_000_000), st.data())
def test_every_flipped_bit_of_a_large_tensor_changes_its_entry(num_bytes: int, data: st.DataObject) -> None:
    tensor = torch.arange(num_bytes, dtype=torch.int64).mul_(2654435761).to(torch.uint8)
    before = entry(tensor)
    flip(tensor, data.draw(st.integers(0, num_bytes - 1)), data.draw(st.integers(0, 7)))
    assert entry(tensor) != before


@settings(max_examples=50)
@given(st.integers(0, 63), st.integers(0, MOST_PARTS - 1), st.integers(0, MOST_PARTS - 1))
def test_the_same_bit_flipped_in_two_parts_of_a_tensor_changes_its_entry(bit: int, one: int, other: int) -> None:
    tensor = words(MOST_PARTS * WORDS_PER_PART)
    before = entry(tensor)
    for part in {one, other}:
        flip(tensor, part * WORDS_PER_PART * 8 + bit // 8, bit % 8)
    assert entry(tensor) != before


def test_no_pair_among_five_hundred_random_pairs_of_flips_hides_itself() -> None:
    tensor, dice = words(MOST_PARTS * WORDS_PER_PART), random.Random(0)
    before, missed = entry(tensor), 0
    for _ in range(500):
        where = [(dice.randrange(tensor.nbytes), dice.randrange(8)) for _ in range(2)]
        for byte, bit in where:
            flip(tensor, byte, bit)
        missed += entry(tensor) == before and where[0] != where[1]
        for byte, bit in where:
            flip(tensor, byte, bit)
    assert missed == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_have_equal_entries_however_they_lie_in_memory(dtype: torch.dtype) -> None:
    for layout in LAYOUTS:
        tensor = laid_out(layout, dtype)
        assert entry(tensor) == entry(tensor.clone(memory_format=torch.contiguous_format))


def test_a_lazily_conjugated_tensor_counts_by_its_values() -> None:
    tensor = torch.randn(5, dtype=torch.complex64)
    assert entry(tensor.conj()) == entry(tensor.conj().resolve_conj())
    assert entry(tensor.conj()) != entry(tensor)


def test_a_tensor_without_elements_has_an_entry() -> None:
    assert entry(torch.empty(0, 3)) == 0


def test_a_parameter_that_requires_grad_has_an_entry() -> None:
    parameter = torch.nn.Parameter(torch.randn(4))
    assert entry(parameter) == entry(parameter.detach())


def test_entries_stand_in_the_order_of_names_and_belong_to_them_alone() -> None:
    state = {"b": torch.ones(3), "a": torch.zeros(300_000), "c": 7}
    before = fingerprints(state)
    state["b"][1] = 2
    after = fingerprints(state)
    assert before.dtype == torch.int64
    assert (before != after).tolist() == [False, True, False]


@pytest.mark.parametrize(("one", "other"), [(1, 2), (1, 1.0), (0.1, math.nextafter(0.1, 1)), ("a", "b"), (None, 0)])
def test_plain_values_that_differ_have_different_entries(one: object, other: object) -> None:
    assert entry(one) != entry(other)


def test_a_flipped_bit_inside_a_list_or_mapping_of_an_optimizer_shows() -> None:
    value = {"directions": [torch.ones(3), torch.ones(2)], "count": 4}
    before = entry(value)
    flip(value["directions"][1], byte=7, bit=3)  # type: ignore[index]
    assert entry(value) != before


def test_swapped_tensors_of_a_list_show() -> None:
    one, other = torch.ones(3), torch.zeros(3)
    assert entry([one, other]) != entry([other, one])


@given(st.integers(-(2**63), 2**63 - 1))
def test_numbers_that_are_complements_inside_the_scramble_stay_apart(number: int) -> None:
    offset = torch.tensor(OFFSET_OF_THE_FIRST_PLACE)
    one, complement = torch.tensor(number) - offset, ~torch.tensor(number) - offset
    assert entry(one) != entry(complement)


def test_a_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(BadArgument, match="embedding is a sparse tensor"):
        fingerprints({"embedding": torch.eye(3).to_sparse()})


def test_all_that_adam_keeps_has_an_entry() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert fingerprints(optimizer.state[parameter]).count_nonzero() == 3


def test_the_combination_is_sixteen_bytes_that_change_with_any_entry() -> None:
    assert len(combined(vector(1, 2))) == 16
    assert combined(vector(1, 2)) == combined(vector(1, 2))
    assert combined(vector(1, 2)) != combined(vector(1, -2))


def test_workers_that_agree_have_no_drift() -> None:
    assert odd_ones([vector(1, 2)] * 3, ["a", "b"]) is None


def test_the_worker_that_differs_from_the_majority_is_guilty() -> None:
    found = odd_ones([vector(9, 2, 9), vector(1, 2, 3), vector(1, 2, 3)], ["a", "b", "c"])
    assert found == Drift(guilty=(0,), healthy=1, names=("a", "c"))


@pytest.mark.parametrize("entries", [(1, 2), (1, 1, 2, 2), (1, 1, 2, 3), (1, 2, 3)])
def test_without_a_strict_majority_nobody_is_guilty(entries: tuple[int, ...]) -> None:
    assert odd_ones([vector(number) for number in entries], ["a"]) == Drift(guilty=(), healthy=None, names=("a",))


@given(st.integers(1, 9), st.data())
def test_a_minority_of_any_kind_is_found(num_odd: int, data: st.DataObject) -> None:
    entries = [0] * (num_odd + 1) + data.draw(st.lists(st.integers(1, 3), min_size=num_odd, max_size=num_odd))
    entries = data.draw(st.permutations(entries))
    found = odd_ones([vector(number) for number in entries], ["a"])
    assert found is not None
    assert found.guilty == tuple(rank for rank, number in enumerate(entries) if number)
    assert found.healthy is not None
    assert entries[found.healthy] == 0


def test_workers_with_different_numbers_of_tensors_have_drifted_without_names() -> None:
    found = odd_ones([vector(1), vector(1, 2), vector(1, 2)], ["a", "b"])
    assert found == Drift(guilty=(0,), healthy=1, names=())
    assert "in how many tensors they hold" in found.sentence(3)


def test_the_guilty_and_the_names_are_told() -> None:
    assert Drift((2,), 0, ("w", "x", "y", "z")).sentence(400) == (
        "! step 400: worker 2 has drifted from the majority: different bits in w, x, y and 1 more; healed from worker "
        "0. If the script itself does it, `lockstep verify SCRIPT` shows where."
    )


def test_several_guilty_are_told_by_their_slots() -> None:
    result = Drift((0, 2), 1, ("w",)).sentence(400, slots=[4, 5, 7])
    assert result.startswith(
        "! step 400: workers 4 and 7 have drifted from the majority: different bits in w; healed from worker 5"
    )


def test_a_drift_without_majority_says_what_to_do() -> None:
    result = Drift((), None, ("w",)).sentence(400)
    assert "they differ in w; no majority" in result
    assert "Resume from a checkpoint of before step 400." in result
    assert result.endswith("If the script itself does it, `lockstep verify SCRIPT` shows where.")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_device_gives_the_entries_of_the_cpu(dtype: torch.dtype) -> None:
    state = {layout: laid_out(layout, dtype) for layout in LAYOUTS} | {"large": words(300_000).view(dtype), "number": 7}
    there = {name: value.cuda() if torch.is_tensor(value) else value for name, value in state.items()}
    assert torch.equal(fingerprints(state), fingerprints(there))
