"""Buffers through the lanes of real workers, against what each lane leaves when it is alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workers import on_workers

import lockstep
from lockstep.lanes import Branch, Tree, lane_tree, present_lanes, share

LANES = 6


class Counting(nn.Module):
    """Leaves in every lane something else in each kind of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("largest", torch.full((3,), -(2**62)))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("last", torch.zeros(2, 3, dtype=torch.int32).T)
        self.register_buffer("seldom", torch.tensor([1, 2], dtype=torch.int16))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("precise", torch.zeros(2, 2, dtype=torch.float64))
        self.register_buffer("rounded", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("never", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        first = int(x[0, 0])
        self.count += first + 1
        self.largest = self.largest + 2**40 * first  # another tensor
        self.seen[first % 5] = True
        self.last.fill_(-first * 70_000)
        if first % 2:
            self.seldom.mul_(-first)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
            self.precise.add_(first / 3)
            self.rounded.add_(first / 7)
        return self.linear(x)


def data(num_samples: int) -> Tensor:
    return torch.arange(num_samples * 4.0).view(num_samples, 4)[:, [1, 0, 2, 3]] / 4 + 3


def after_a_step(num_samples: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with lockstep.start(lanes=LANES) as run:
        model = Counting()
        run.replicate(model)
        for x in run.lanes(data(num_samples)):
            model(x).sum().backward()
        return shown(model)


def shown(model: nn.Module) -> dict[str, Any]:
    return {name: listed(value) for name, value in model.named_buffers()}


def listed(value: Tensor) -> list[Any]:
    return [str(value.dtype), value.tolist()]


def left_by_a_lane(lane: int, num_samples: int) -> dict[str, Tensor]:
    model = Counting()
    own = share(num_samples, lane, LANES)
    model(data(num_samples)[own.start : own.stop])
    return dict(model.named_buffers())


def mean_of(name: str, tree: Tree, lanes: dict[int, dict[str, Tensor]], num_samples: int) -> Tensor:
    if isinstance(tree, Branch):
        return mean_of(name, tree.left, lanes, num_samples) + mean_of(name, tree.right, lanes, num_samples)
    assert isinstance(tree, int)
    return lanes[tree][name] * (len(share(num_samples, tree, LANES)) / num_samples)


@pytest.mark.parametrize(("num_samples", "num_workers"), [(13, 1), (13, 2), (13, 3), (4, 3), (1, 2), (12, 4)])
def test_statistics_are_averaged_and_counters_come_from_the_lowest_lane(num_samples: int, num_workers: int) -> None:
    """With 4 samples the lowest lanes are empty, and with 1 sample so is a worker."""
    found = on_workers(num_workers, after_a_step, num_samples)
    present = present_lanes(num_samples, LANES)
    lanes = {lane: left_by_a_lane(lane, num_samples) for lane in present}
    tree = lane_tree(LANES, present)
    assert tree is not None
    for buffers in found:
        for name, value in lanes[present[0]].items():
            averaged = value.is_floating_point()
            expected = mean_of(name, tree, lanes, num_samples) if averaged else value
            assert buffers[name] == listed(expected), name


def replaced_between_steps() -> dict[str, Any]:
    with lockstep.start(lanes=LANES) as run:
        model = Counting()
        run.replicate(model)
        for _ in range(2):
            for x in run.lanes(data(12)):
                model(x).sum().backward()
        model.count = torch.tensor(3)  # between steps a buffer is the user's, who may put another there
        model.mean = torch.ones(4, dtype=torch.float64)
        model.seen = torch.zeros(10, dtype=torch.bool)
        for x in run.lanes(data(12)):
            model(x).sum().backward()
        return shown(model)


def test_buffers_may_be_replaced_between_steps() -> None:
    alone = replaced_between_steps()
    assert alone["count"][1] == 3 + 3 + 1
    assert len(alone["seen"][1]) == 10
    for num_workers in (2, 3):
        assert on_workers(num_workers, replaced_between_steps) == [alone] * num_workers


class Caching(nn.Module):
    """Makes a table when it first evaluates, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("table", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        if self.training:
            return result
        if len(self.table) == 1:
            self.table = torch.tensor([1.0, 2.0])
        return result * self.table[-1]


def a_buffer_made_in_inference_mode() -> str:
    with lockstep.start(lanes=LANES) as run:
        torch.manual_seed(0)
        model = Caching()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.replicate(model, optimizer)
        for _ in run.epochs(3):
            model.train()
            for x in run.lanes(data(12)):
                model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.inference_mode():
                for x in run.lanes(data(12)):
                    model(x)
        digest: str = run.digest()
        return digest


def test_a_buffer_that_was_made_in_inference_mode_has_no_versions() -> None:
    (alone,) = on_workers(1, a_buffer_made_in_inference_mode)
    assert on_workers(3, a_buffer_made_in_inference_mode) == [alone] * 3
