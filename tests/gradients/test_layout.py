"""Which parameter sits where: decided alike everywhere."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.gradients.layout import Spec, make_layout


def spec(name: str, size: int, dtype: torch.dtype = torch.float32, trainable: bool = True, model: int = 0) -> Spec:
    return Spec(name, (size,), (1,), dtype, "cpu", trainable, model)


specs_lists = st.lists(
    st.builds(
        spec,
        st.uuids().map(str),
        st.integers(0, 50),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.booleans(),
        st.integers(0, 1),
    ),
    max_size=30,
)


@given(specs_lists, st.integers(1, 400), st.integers(1, 400))
def test_every_trainable_parameter_has_one_place_and_no_two_overlap(specs: list[Spec], first: int, others: int) -> None:
    layout = make_layout(specs, bucket_bytes=others, first_bucket_bytes=first)
    placed = sorted(slot.index for bucket in layout.buckets for slot in bucket.slots)
    assert placed == [index for index, item in enumerate(specs) if item.trainable]
    for bucket in layout.buckets:
        ends = [slot.offset + slot.spec.num_elements for slot in bucket.slots]
        assert [slot.offset for slot in bucket.slots] == [0, *ends[:-1]]


@given(specs_lists)
def test_a_bucket_has_one_dtype_and_one_model(specs: list[Spec]) -> None:
    for bucket in make_layout(specs).buckets:
        assert len({(slot.spec.dtype, slot.spec.model) for slot in bucket.slots}) == 1


def test_a_bucket_is_not_larger_than_told_unless_one_parameter_is() -> None:
    layout = make_layout([spec("a", 100), spec("b", 10), spec("c", 10), spec("d", 10)], 80, 80)
    sizes = [[slot.spec.name for slot in bucket.slots] for bucket in layout.buckets]
    assert sizes == [["d", "c"], ["b"], ["a"]]


def test_freezing_a_parameter_changes_the_fingerprint() -> None:
    one = make_layout([spec("a", 3), spec("b", 3)])
    other = make_layout([spec("a", 3), spec("b", 3, trainable=False)])
    assert one.fingerprint != other.fingerprint


def test_a_channels_last_parameter_keeps_its_strides() -> None:
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    assert Spec.of("w", conv.weight).stride == tuple(conv.weight.stride())
