"""Cutting a whole batch: nothing lost, nothing twice, types kept, and errors that name the part."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from lockstep.data import num_samples, take
from lockstep.errors import CannotCut
from lockstep.lanes import share


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Sealed:
    x: Any
    names: Any
    seen: int = field(default=0, init=False, repr=False)


@dataclass(slots=True)
class Slotted:
    x: Any


class Words(list):  # type: ignore[type-arg]
    """A list of its own type."""


def batch_of(size: int) -> dict[str, Any]:
    """Every kind of container and leaf, with `size` samples."""
    rows = torch.arange(size)
    return {
        "tensor": rows,
        "array": numpy.arange(size),
        "names": [str(i) for i in range(size)],
        "pairs": (rows.clone(), [rows + 1, tuple(range(size))]),
        "named": Pair(rows, Pair(rows, rows)),
        "sealed": Slotted(rows),
    }


def flat(part: Any) -> list[Any]:
    """The samples of every leaf of `batch_of`, leaf after leaf."""
    if isinstance(part, dict):
        return [flat(inner) for inner in part.values()]
    if isinstance(part, Slotted):
        return flat(part.x)
    if isinstance(part, torch.Tensor | numpy.ndarray):
        return list(part.tolist())
    if all(isinstance(inner, int | str) for inner in part):
        return list(part)
    return [flat(inner) for inner in part]


def joined(parts: list[Any]) -> Any:
    """Lists of lists of samples, put together leaf by leaf."""
    if any(isinstance(inner, list) for inner in parts[0]):
        return [joined(list(inner)) for inner in zip(*parts, strict=True)]
    return [sample for part in parts for sample in part]


@given(size=st.integers(0, 40), num_lanes=st.integers(1, 12))
def test_the_lanes_of_a_batch_put_together_are_the_batch(size: int, num_lanes: int) -> None:
    batch = batch_of(size)
    parts = [take(batch, share(size, lane, num_lanes)) for lane in range(num_lanes)]
    assert joined([flat(part) for part in parts]) == flat(batch)


@given(size=st.integers(0, 40))
def test_every_part_of_a_batch_counts_the_same_samples(size: int) -> None:
    assert num_samples(batch_of(size)) == size


@pytest.mark.parametrize("empty", [[], (), torch.empty(0, 3), {"x": torch.empty(0)}, (torch.empty(0), [])])
def test_an_empty_batch_has_no_samples(empty: Any) -> None:
    assert num_samples(empty) == 0


@pytest.mark.parametrize(
    "batch",
    [
        OrderedDict(x=torch.arange(4)),
        MappingProxyType({"x": torch.arange(4)}),
        Pair(torch.arange(4), torch.arange(4)),
        Slotted(torch.arange(4)),
        (torch.arange(4),),
        [torch.arange(4)],
        Words("abcd"),
        ("a", "b", "c", "d"),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_container_keeps_its_type(batch: Any) -> None:
    assert type(take(batch, range(1, 3))) is type(batch)


def test_a_defaultdict_keeps_its_factory() -> None:
    batch = defaultdict(list, x=torch.arange(4))
    assert take(batch, range(2)).default_factory is list


def test_cutting_leaves_the_batch_as_it_was() -> None:
    batch = {"x": torch.arange(4), "inner": Slotted(torch.arange(4))}
    take(batch, range(1))
    assert num_samples(batch) == 4


def test_a_tensor_is_cut_without_copying() -> None:
    x = torch.arange(4)
    assert take([x], range(1, 3))[0].data_ptr() == x[1:].data_ptr()


def test_strings_in_a_list_are_samples_and_lists_in_a_list_are_structure() -> None:
    assert take([["a", "b", "c"], [1, 2, 3]], range(1, 3)) == [["b", "c"], [2, 3]]


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"x": torch.ones(2), "mask": None}, 'batch["mask"] is None'),
        ({"x": torch.ones(2), "scale": torch.tensor(1.0)}, 'batch["scale"] is a tensor of shape ()'),
        ((torch.ones(2), Pair(0.5, torch.ones(2))), "batch[1].x is of type float"),
        ((torch.ones(2), "train"), "batch[1] is of type str"),
        ({3: {torch.ones(1)}}, "batch[3] is of type set"),
        (Sealed(torch.ones(2), ["a", "b"]), "batch.seen is of type int"),
        (Slotted(object()), "batch.x is of type object"),
        ([numpy.float32(1), torch.ones(1)], "batch[0] is of type float32"),
        (5, "batch is of type int"),
        ([torch.eye(2).to_sparse()], "batch[0] is a sparse_coo tensor"),
        ({}, "batch is of type dict and holds nothing"),
    ],
)
def test_what_cannot_be_cut_is_named_by_its_path(batch: Any, named: str) -> None:
    with pytest.raises(CannotCut) as error:
        num_samples(batch)
    assert str(error.value).startswith(named)


def test_a_packed_sequence_is_refused_with_the_way_out() -> None:
    with pytest.raises(CannotCut, match=r"batch\[1\] is of type PackedSequence.*pack inside the loop"):
        num_samples([torch.ones(2), pack_sequence([torch.ones(2), torch.ones(1)])])


def test_parts_of_different_length_are_both_named() -> None:
    with pytest.raises(CannotCut, match=r'batch\["x"\] holds 3 samples and batch\["y"\]\[1\] holds 2'):
        num_samples({"x": torch.ones(3), "y": (torch.ones(3), ["a", "b"])})


def test_take_alone_also_refuses_what_has_no_rows() -> None:
    with pytest.raises(CannotCut, match=r"batch\[1\]"):
        take((torch.ones(2), None), range(1))
