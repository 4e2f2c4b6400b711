"""A compiled model: one digest on any number of workers, in every way that people compile, with uneven lanes.

The ways that need a GPU (CUDA graphs, tuned kernels) are in tests/gpu/test_gpu_compiled.py.
"""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from workers import on_workers

import lockstep

WAYS = ("before", "after", "in place", "regional", "whole lane", "graph breaks", "checkpoints", "optimizer")
WIDTH = 16

needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.gelu(self.inner(self.norm(x))), 0.1)


class Net(nn.Module):
    """With a graph break after every block, or its blocks checkpointed, if asked."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks, self.head, self.way = nn.ModuleList([Block()]), nn.Linear(WIDTH, 3), way

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.way == "checkpoints" else block(x)
            if self.way == "graph breaks":
                torch._dynamo.graph_break()
        return self.head(x)


def compiled(net: Net, way: str, backend: str) -> Callable[[Tensor], Tensor]:
    if way in ("before", "graph breaks", "checkpoints"):
        return torch.compile(net, backend=backend)
    if way == "in place":
        net.compile(backend=backend)
    if way == "regional":
        for block in net.blocks:
            block.compile(backend=backend)
    return net


def trained(way: str, backend: str) -> list[Any]:
    """The digest after some steps whose lanes have two sizes, and then two others; and the losses."""
    torch._dynamo.reset()
    losses = []
    with lockstep.start(lanes=4, seed=3) as run:
        net = Net(way)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        model = compiled(net, way, backend)
        run.replicate(model if way == "before" else net, optimizer)
        if way == "after":
            model = torch.compile(net, backend=backend)

        def lane(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x), y)

        forward = torch.compile(lane, backend=backend) if way == "whole lane" else lane
        update = torch.compile(optimizer.step, backend=backend) if way == "optimizer" else optimizer.step
        for step in range(3):
            torch.manual_seed(step)
            number = 14 if step % 2 else 22
            for x, y in run.lanes((torch.randn(number, WIDTH), torch.randint(3, (number,)))):
                run.backward(forward(x, y))
            update()
            optimizer.zero_grad()
            losses.append(run.loss)
        return [run.digest(), losses]


def several_ways(ways: list[str], backend: str) -> dict[str, list[Any]]:
    return {way: trained(way, backend) for way in ways}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "ways",
    [["graph breaks"], pytest.param(list(WAYS), marks=pytest.mark.soak)],
    ids=["one", "all"],
)
def test_a_way_to_compile_has_the_bits_of_one_worker_on_two(ways: list[str]) -> None:
    alone = on_workers(1, several_ways, ways, "aot_eager", limit_s=400)[0]
    assert on_workers(2, several_ways, ways, "aot_eager", limit_s=400) == [alone] * 2
    models = {digest for way, (digest, _) in alone.items() if way != "optimizer"}
    assert len(models) == 1  # this backend keeps the kernels of a model, and cuts an optimizer's into small ones


@pytest.mark.soak
@needs_a_compiler
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_inductor_has_the_bits_of_one_worker_on_two_and_three(way: str) -> None:
    alone = on_workers(1, trained, way, "inductor", limit_s=280)[0]
    for number in (2, 3):
        assert on_workers(number, trained, way, "inductor", limit_s=280) == [alone] * number
