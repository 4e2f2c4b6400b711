"""Refusing is on while attention's kernels are launched, compiled or not, and at no other time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from workers import apart

from lockstep.determinism.attention import deterministic_attention, strict_backwards

CPU = torch.device("cpu")
Q = torch.randn(1, 2, 4, 8)
ON_CPU = ("_scaled_dot_product_flash_attention_for_cpu_backward",)


@pytest.fixture(autouse=True)
def warning_only() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def refuses() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def test_attention_leaves_torch_warning_as_before() -> None:
    with deterministic_attention(CPU):
        F.scaled_dot_product_attention(Q, Q, Q)
        assert not refuses()


def test_who_wants_refusing_keeps_it() -> None:
    torch.use_deterministic_algorithms(True)
    with deterministic_attention(CPU):
        F.scaled_dot_product_attention(Q, Q, Q)
        assert refuses()


def test_cudnns_attention_may_be_chosen_again_afterwards() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with deterministic_attention(CPU):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Whether refusing was on when an operator's kernel was about to run."""

    def __init__(self) -> None:
        super().__init__()
        self.refusing: dict[str, bool] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.refusing[operator._opname] = refuses()
        return operator(*args, **(kwargs or {}))


def backward_of(compute: Any) -> dict[str, bool]:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    loss = compute(q)
    with Seen() as seen:
        loss.backward()
    assert not refuses()
    return seen.refusing


def attend(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q).square().sum()


@apart
def test_refusing_is_on_for_the_backward_kernel_alone() -> None:
    with strict_backwards(ON_CPU, "AutogradCPU"):
        seen = backward_of(attend)
    assert [name for name, refusing in seen.items() if refusing] == list(ON_CPU)
    assert len(seen) > 1
    assert not any(backward_of(attend).values())


@apart
def test_refusing_is_on_for_the_backward_kernel_of_a_compiled_model() -> None:
    with strict_backwards(ON_CPU, "AutogradCPU"):
        seen = backward_of(torch.compile(attend, backend="aot_eager"))
    assert [name for name, refusing in seen.items() if refusing] == list(ON_CPU)


@apart
def test_a_backward_kernel_that_fails_leaves_refusing_off() -> None:
    wrong = torch.ones(1)
    with strict_backwards(ON_CPU, "AutogradCPU"), pytest.raises((RuntimeError, TypeError, IndexError)):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            wrong, wrong, wrong, wrong, wrong, wrong, 0.0, False
        )
    assert not refuses()
