"""Refusing is on while attention runs, and at no other time: also after a backward pass of it has failed."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from lockstep.determinism import attention
from lockstep.determinism.attention import deterministic_attention

Q = torch.randn(1, 2, 4, 8)


@pytest.fixture(autouse=True)
def warning_only() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    attention._left_on.clear()


def refuses() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def test_attention_leaves_torch_warning_as_before() -> None:
    with deterministic_attention():
        F.scaled_dot_product_attention(Q, Q, Q)
        assert not refuses()


def test_what_a_failed_backward_pass_left_on_is_switched_off_by_the_next_attention() -> None:
    with deterministic_attention():
        attention._left_on.append(attention._switch_on())  # as before a kernel that then raises
        assert refuses()
        F.scaled_dot_product_attention(Q, Q, Q)
        assert not refuses()


def test_who_wants_refusing_keeps_it() -> None:
    torch.use_deterministic_algorithms(True)
    with deterministic_attention():
        F.scaled_dot_product_attention(Q, Q, Q)
        assert refuses()
