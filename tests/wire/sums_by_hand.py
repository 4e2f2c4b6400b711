"""Sums to hold the wire's against, and a GPU that is played by the CPU."""

from typing import Any

import torch

from lockstep.lanes import Branch, Reduction, Root, Tree
from lockstep.wire.cuda.gpu import Gpu

CPU = torch.device("cpu")


def by_hand(tree: Tree, roots: dict[Root, torch.Tensor]) -> torch.Tensor:
    """The sum by torch, bracket by bracket."""
    if isinstance(tree, Branch):
        return by_hand(tree.left, roots) + by_hand(tree.right, roots)
    assert isinstance(tree, Root)
    return roots[tree]


def random_roots(whole: Reduction, size: int, dtype: torch.dtype, turn: int = 0) -> dict[Root, torch.Tensor]:
    """What every worker hands in: the same on every worker."""
    found = {}
    for rank, number in enumerate(whole.roots_of):
        for index in range(number):
            generator = torch.Generator().manual_seed(1000 * rank + 10 * index + size + 7 * turn)
            found[Root(rank, index)] = (1000 * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype)
    return found


class Done:
    """An event on a CPU, where everything is done when a call returns."""

    def synchronize(self) -> None:
        pass


class PlayedGpu(Gpu):
    """The CPU in the place of a GPU: its one stream does at once what is put into it."""

    def stream(self) -> int:
        return 0

    def mark(self) -> Any:
        return Done()

    def finish(self) -> None:
        pass
