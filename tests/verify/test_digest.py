"""Equal digests mean equal bits, and nothing else."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lockstep.verify.digest import combined, digest, digest_of


@dataclass
class Pair:
    x: torch.Tensor
    y: list[torch.Tensor]


ONE = torch.tensor([1.0, 2.0])
NEXT = torch.tensor([1.0, 2.0]).nextafter(torch.tensor(9.0))


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: [t], lambda t: {"a": (t,)}, lambda t: Pair(t, [t]), np.asarray]
)
def test_one_bit_in_any_container_changes_the_digest(wrap) -> None:  # type: ignore[no-untyped-def]
    assert digest_of(wrap(ONE)) == digest_of(wrap(ONE.clone()))
    assert digest_of(wrap(ONE)) != digest_of(wrap(NEXT))


def test_large_tensors_in_a_list_count_with_all_their_values() -> None:
    a, b = torch.zeros(5000), torch.zeros(5000)
    b[2500] = 1e-30
    assert digest_of([a]) != digest_of([b])


def test_dtype_and_shape_count() -> None:
    zeros = torch.zeros(4)
    assert len({digest_of(zeros), digest_of(zeros.view(2, 2)), digest_of(zeros.int())}) == 3


def test_strides_do_not_count() -> None:
    image = torch.randn(2, 3, 4, 4)
    assert digest_of(image) == digest_of(image.to(memory_format=torch.channels_last))


def test_an_objects_address_does_not_count() -> None:
    assert digest_of([object(), deque([1])]) == digest_of([object(), deque([1])])


def test_zero_and_minus_zero_differ() -> None:
    assert digest_of(torch.tensor(0.0)) != digest_of(torch.tensor(-0.0))


def test_the_order_of_names_does_not_count() -> None:
    assert digest({"a": ONE, "b": 1}) == digest({"b": 1, "a": ONE})


def test_the_whole_is_made_of_the_parts() -> None:
    assert digest({"a": ONE, "b": 1}) == combined({"a": digest_of(ONE), "b": digest_of(1)})
