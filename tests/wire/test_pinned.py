"""Host memory that a GPU copies from and to by itself."""

import os

import pytest
import torch

from lockstep.wire.cuda.pinned import pin
from lockstep.wire.shared.segments import allocate, mapped

pytestmark = pytest.mark.cuda


def memory(num_bytes: int = 1 << 20) -> torch.Tensor:
    file = allocate(num_bytes)
    try:
        return mapped(file, num_bytes)
    finally:
        os.close(file)


def test_pinned_memory_takes_copies_and_is_free_again_when_nobody_has_it() -> None:
    for _ in range(3):
        shared = memory()
        assert pin(shared)
        assert shared.is_pinned()
        shared.view(torch.float32).copy_(torch.arange(1 << 18, device="cuda"), non_blocking=True)
        torch.cuda.synchronize()
        assert shared.view(torch.float32)[-1] == (1 << 18) - 1
        del shared


def test_memory_that_cannot_be_pinned_is_refused_and_the_gpu_goes_on() -> None:
    shared = memory()
    assert pin(shared)
    assert not pin(shared)
    assert torch.ones(3, device="cuda").sum() == 3
