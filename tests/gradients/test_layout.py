"""Which parameter sits where: decided alike everywhere."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.gradients.layout import Spec, make_layout


def spec(name: str, size: int, dtype: torch.dtype = torch.float32, trainable: bool = True, model: int = 0) -> Spec:
    return Spec(name, (size,), (1,), dtype, "cpu", trainable, model)


specs_lists = st.lists(
    st.builds(
        Spec,
        st.uuids().map(str),
        st.tuples(st.integers(0, 300)),
        st.just((1,)),
        st.sampled_from([torch.float32, torch.bfloat16, torch.complex64]),
        st.just("cpu"),
        st.booleans(),
        st.integers(0, 1),
        reduced_as=st.sampled_from([None, torch.float64, torch.bfloat16]),
    ),
    max_size=30,
)


@given(specs_lists, st.integers(1, 4000), st.integers(1, 4000))
def test_every_trainable_parameter_has_one_place_and_no_two_overlap(specs: list[Spec], first: int, others: int) -> None:
    layout = make_layout(specs, bucket_bytes=others, first_bucket_bytes=first)
    placed = sorted(slot.index for bucket in layout.buckets for slot in bucket.slots)
    assert placed == [index for index, item in enumerate(specs) if item.trainable]
    for bucket in layout.buckets:
        ends = [slot.offset + slot.spec.num_elements for slot in bucket.slots]
        assert all(slot.offset >= end for slot, end in zip(bucket.slots, [0, *ends], strict=False))
        assert bucket.num_elements >= ends[-1]


@given(specs_lists)
def test_a_parameter_is_as_aligned_in_a_bucket_as_a_tensor_of_its_own_and_no_room_is_wasted(specs: list[Spec]) -> None:
    for bucket in make_layout(specs, bucket_bytes=4000).buckets:
        places = [slot.offset for slot in bucket.slots] + [bucket.num_elements]
        spec = bucket.slots[0].spec
        itemsizes = (spec.dtype.itemsize, spec.wire_dtype.itemsize)
        assert all(place * size % 256 == 0 for place in places for size in itemsizes)
        for slot, following in zip(bucket.slots, places[1:], strict=True):
            assert (following - slot.offset - slot.spec.num_elements) * min(itemsizes) < 256


@given(specs_lists)
def test_a_bucket_has_one_dtype_and_one_model(specs: list[Spec]) -> None:
    for bucket in make_layout(specs).buckets:
        assert len({(s.spec.dtype, s.spec.wire_dtype, s.spec.model) for s in bucket.slots}) == 1


def test_a_bucket_is_not_larger_than_told_unless_one_parameter_is() -> None:
    layout = make_layout([spec("a", 640), spec("b", 64), spec("c", 60), spec("d", 64)], 512, 512)
    sizes = [[slot.spec.name for slot in bucket.slots] for bucket in layout.buckets]
    assert sizes == [["d", "c"], ["b"], ["a"]]


def test_freezing_a_parameter_changes_the_fingerprint() -> None:
    one = make_layout([spec("a", 3), spec("b", 3)])
    other = make_layout([spec("a", 3), spec("b", 3, trainable=False)])
    assert one.fingerprint != other.fingerprint


def test_a_channels_last_parameter_keeps_its_strides() -> None:
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    assert Spec.of("w", conv.weight).stride == tuple(conv.weight.stride())
