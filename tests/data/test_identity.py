"""What a data set is made of, without reading a sample."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep.data.identity import MOST_ELEMENTS, made_of


class Holder(Dataset[Any]):
    """A data set that holds one thing, and must not be read."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is to be read")

    def __len__(self) -> int:
        return 3


NAMES = [f"f{number}" for number in range(5000)]
OTHERS = {
    "names": (NAMES, random.Random(1).sample(NAMES, len(NAMES))),
    "indices": (range(90), list(reversed(range(90)))),
    "files and labels": ([("a/1.png", 0), ("a/2.png", 1)], [("a/2.png", 1), ("a/1.png", 0)]),
    "paths": ([Path("a/1"), Path("a/2")], [Path("b/1"), Path("b/2")]),
    "the number of a class": ({"cat": 0, "dog": 1}, {"cat": 1, "dog": 0}),
    "a tensor": (torch.arange(6), torch.arange(6).flip(0)),
    "tensors": ([torch.zeros(2), torch.ones(2)], [torch.ones(2), torch.zeros(2)]),
    "an array": (np.arange(6.0), np.arange(6.0)[::-1].copy()),
    "words in an array": (np.array(["a", "b"]), np.array(["b", "a"])),
    "a part": (NAMES[::2], NAMES[1::2]),
}
ALIKE = {
    "a table in another order": ({"cat": 0, "dog": 1}, {"dog": 1, "cat": 0}),
    "files on another disk": (["/data/a/1.png", "/data/a/2.png"], ["/mnt/other/a/1.png", "/mnt/other/a/2.png"]),
    "a set": ({1, 2}, {3, 4}),
    "one number, as of a rank": (0, 1),
    "a word": ("/tmp/a", "/tmp/b"),
    "objects": ([object(), object()], [object(), object()]),
    "an empty list, as of a cache": ([], []),
    "a very large table": (dict.fromkeys(range(20_000), 1), dict.fromkeys(range(20_000), 2)),
    "a tensor without elements": (torch.zeros(3, device="meta"), torch.ones(3, device="meta")),
    "a sparse tensor": (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
    "sparse tensors": ([torch.eye(3).to_sparse()] * 2, [torch.eye(3).to_sparse()] * 3),
    "a tensor of one number": (torch.tensor(1.0), torch.tensor(2.0)),
    "objects in an array": (np.array([object(), None]), np.array([None, object()])),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_data_sets_that_differ_are_told_apart(kind: str) -> None:
    one, other = OTHERS[kind]
    assert made_of(Holder(one)).keys() == made_of(Holder(other)).keys() == {"Holder.held"}
    assert made_of(Holder(one)) != made_of(Holder(other))
    assert made_of(Holder(one)) == made_of(Holder(one))


@pytest.mark.parametrize("kind", ALIKE)
def test_what_may_differ_or_cannot_be_compared_is_left_out(kind: str) -> None:
    one, other = ALIKE[kind]
    assert made_of(Holder(one)) == made_of(Holder(other))


def test_data_sets_inside_of_others_are_looked_at() -> None:
    whole = ConcatDataset([TensorDataset(torch.zeros(2)), Subset(Holder(NAMES), [2, 1])])
    found = made_of(whole)
    assert found["ConcatDataset.datasets[1].indices"].startswith("2: 2, 1, ...")
    assert "ConcatDataset.datasets[1].dataset.held" in found


def test_of_a_long_list_elements_at_even_distances_count() -> None:
    long = list(range(10 * MOST_ELEMENTS))
    changed = [*long]
    changed[10] += 1
    assert made_of(Holder(long)) != made_of(Holder(changed))
    assert made_of(Holder(long)) != made_of(Holder(long[:-1]))
    assert len(made_of(Holder(long))["Holder.held"]) < 100
