"""Re-entrant activation checkpoints, as many as a lane needs: the same bits on any number of workers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from workers import on_workers

import lockstep
from lockstep.lanes import share

LANES = 6
X = torch.randn(13, 6, generator=torch.Generator().manual_seed(5))
LANE_OF = torch.tensor([lane for lane in range(LANES) for _ in share(13, lane, LANES)])


class Deep(nn.Module):
    """One block, used as often as the lane's data say, each time under a checkpoint, and once without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.block, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, times: int, reentrant: bool = True) -> Tensor:
        h = x.requires_grad_()
        for _ in range(times):
            h = torch.tanh(checkpoint(self.block, h, use_reentrant=reentrant))
        return self.out(self.block(h)).square().mean()


def rising(lane: int) -> int:
    return lane


def falling(lane: int) -> int:
    return LANES - 1 - lane


def only_late(lane: int) -> int:
    return 3 * (lane == LANES - 1)


def trained(
    times: Callable[[int], int], apart: bool, reentrant: bool = True, model: Callable[[], Deep] = Deep
) -> list[Any]:
    """`apart`: the block has a bucket of its own, as all parts of a large model have."""
    with lockstep.start(lanes=LANES, seed=0) as run:
        deep = model()
        optimizer = torch.optim.SGD(deep.parameters(), 0.1)
        if apart:
            run.replicate(deep.block)
        run.replicate(deep, optimizer)
        for _ in range(3):
            for x, lane in run.lanes((X, LANE_OF)):
                deep(x, times(int(lane[0])), reentrant).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [run.step, run.digest()]


@pytest.mark.parametrize("apart", [False, True], ids=["one bucket", "two buckets"])
@pytest.mark.parametrize("times", [rising, falling, only_late], ids=lambda times: times.__name__)
def test_the_number_of_checkpoints_may_differ_by_lane(times: Callable[[int], int], apart: bool) -> None:
    alone = trained(times, apart)
    assert alone == trained(times, apart, reentrant=False)
    for num_workers in (2, 3, 4):
        assert on_workers(num_workers, trained, times, apart) == [alone] * num_workers


class Recomputed(torch.autograd.Function):
    """A checkpoint that somebody has written himself."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        torch.autograd.backward(out, gradient)
        return None, x.grad


class OwnCheckpoints(Deep):
    def forward(self, x: Tensor, times: int, reentrant: bool = True) -> Tensor:
        h = x.requires_grad_()
        for _ in range(1 + times):
            h = torch.tanh(Recomputed.apply(self.block, h) if reentrant else self.block(h))
        return self.out(h).square().mean()


@pytest.mark.parametrize("times", [rising, falling, only_late], ids=lambda times: times.__name__)
def test_so_may_that_of_checkpoints_that_are_not_torchs(times: Callable[[int], int]) -> None:
    alone = trained(times, False, model=OwnCheckpoints)
    assert alone == trained(times, False, reentrant=False, model=OwnCheckpoints)
    for num_workers in (2, 3):
        assert on_workers(num_workers, trained, times, False, model=OwnCheckpoints) == [alone] * num_workers
