"""Gradients that stand in `p.grad` when a step begins are added to it, whatever becomes of the memory they are in."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.wire.schedules.executor import Executor

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(5))


class KeptMemory:
    """As memory that others have open: what is released is given to the next bucket that fits in."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.own: dict[int, Tensor] = {}
        self.num_reused = 0

    def allocate(self, _: Any, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        for place, piece in enumerate(self.kept):
            if piece.numel() == num_elements:
                self.num_reused += 1
                return self.kept.pop(place)
        made = torch.empty(num_elements, dtype=dtype, device=device)
        self.own[made.data_ptr()] = made
        return made

    def release(self, _: Any, tensor: Tensor) -> None:
        self.kept.append(self.own[tensor.data_ptr()])


class Backwards(nn.Module):
    """Registered in the order opposite to its use, so that buckets are laid out anew before the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def accumulated() -> list[Tensor]:
    torch.manual_seed(1)
    with lockstep.start(lanes=2) as run:
        model = Backwards()
        run.replicate(model, torch.optim.SGD(model.parameters(), 0.1, fused=True))
        for _ in range(2):
            for x in run.lanes(X):
                model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_new_layout_in_the_memory_of_the_old_one_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = accumulated()
    memory = KeptMemory()
    monkeypatch.setattr(Executor, "allocate", lambda *args: memory.allocate(*args))
    monkeypatch.setattr(Executor, "release", lambda *args: memory.release(*args))
    found = accumulated()
    assert memory.num_reused > 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
