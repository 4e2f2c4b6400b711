"""Programs that are legal and not the usual ones: the same bits on any number of workers all the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workers import on_workers

import lockstep
from lockstep.gradients import buffers

LANES, STEPS = 6, 3


def data(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(13, 8, generator=torch.Generator().manual_seed(5)).to(dtype)


def trained(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> list[Any]:
    torch.manual_seed(1)
    with lockstep.start(lanes=LANES, seed=0) as run:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        run.replicate(model, optimizer)
        for _ in range(STEPS):
            for x in run.lanes(data(dtype)):
                run.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [run.digest(), run.loss]


def trained_unnoticed(make: Callable[[], nn.Module]) -> list[Any]:
    """What it would be if lanes wrote over each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "_differs", lambda *_: False)
        return trained(make)


class OwnBatchNorm(nn.Module):
    """Its statistics are written by torch's kernel, which no version counter tells."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.register_buffer("constant", torch.cat([torch.linspace(0.1, 1, 50), torch.tensor([float("nan")])]))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.linear(x), self.mean, self.var, training=self.training)


class Codebook(nn.Module):
    """Writes past autograd, and past its counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.centre.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.linear(x) - self.centre


def test_a_scripted_model_computes_the_same_however_often_a_worker_has_called_it() -> None:
    def make() -> nn.Module:
        layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
        scripted: nn.Module = torch.jit.script(layers)
        return scripted

    alone = trained(make)
    for num_workers in (2, 3):
        assert on_workers(num_workers, trained, make) == [alone] * num_workers


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_in_half_precision_whatever_the_weights_of_lanes(dtype: torch.dtype, num_workers: int) -> None:
    def make() -> nn.Module:
        return nn.Linear(8, 32).to(dtype)

    alone = trained(make, dtype)
    assert on_workers(num_workers, trained, make, dtype) == [alone] * num_workers


@pytest.mark.parametrize("compared", [("cpu",), ()], ids=["on the CPU", "as on a GPU"])
@pytest.mark.parametrize("make", [OwnBatchNorm, Codebook])
def test_buffers_that_are_written_without_a_sign_are_averaged_like_others(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], compared: tuple[str, ...]
) -> None:
    monkeypatch.setattr(buffers, "COMPARED_ALWAYS", compared)
    alone = trained(make)
    assert alone != trained_unnoticed(make)
    for num_workers in (2, 3):
        assert on_workers(num_workers, trained, make) == [alone] * num_workers


def test_a_constant_buffer_is_never_averaged() -> None:
    with lockstep.start(lanes=LANES) as run:
        model = OwnBatchNorm()
        run.replicate(model)
        before = model.constant.clone()
        for x in run.lanes(data()):
            model(x).sum().backward()
        assert torch.equal(model.constant.nan_to_num(7.0), before.nan_to_num(7.0))  # a mean would round
        assert model.mean.any()


def shared_torso() -> list[Any]:
    torch.manual_seed(1)
    with lockstep.start(lanes=LANES, seed=0) as run:
        torso = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        actor, critic = nn.Sequential(torso, nn.Linear(4, 2)), nn.Sequential(torso, nn.Linear(4, 1))
        run.replicate(actor)
        run.replicate(critic)
        for _ in range(STEPS):
            for x in run.lanes(data().repeat(2, 1)):
                actor(x).square().mean().backward()
        return [run.digest(), int(torso[1].num_batches_tracked), float(torso[1].running_mean.abs().sum()) > 0]


def test_a_part_that_two_models_have_in_common_keeps_its_statistics() -> None:
    alone = shared_torso()
    assert alone[1:] == [STEPS, True]
    for num_workers in (2, 3):
        assert on_workers(num_workers, shared_torso) == [alone] * num_workers


def summed_in_place() -> float | None:
    torch.manual_seed(1)
    with lockstep.start(lanes=LANES) as run:
        model = nn.Linear(8, 1)
        run.replicate(model)
        total = None
        for x in run.lanes(data()):
            loss = model(x).square().mean()
            run.backward(loss)
            total = loss.detach() if total is None else total.add_(loss.detach())
        return run.loss


def test_the_loss_is_as_it_was_told_whatever_becomes_of_the_tensor() -> None:
    alone = summed_in_place()
    for num_workers in (2, 3):
        assert on_workers(num_workers, summed_in_place) == [alone] * num_workers


def grown(in_lanes: bool = True) -> list[float]:
    """An embedding that is given rows between two steps."""
    torch.manual_seed(1)
    words = nn.Embedding(5, 3)
    tokens = torch.arange(12) % 5

    def steps(run: lockstep.Run | None) -> None:
        for rows in (5, 100):
            words.weight.data = torch.cat([words.weight.data, torch.ones(rows - len(words.weight), 3)])
            words.weight.grad = None
            if run is None:
                words(tokens).square().mean().backward()
            else:
                for x in run.lanes(tokens):
                    words(x).square().mean().backward()
            with torch.no_grad():
                words.weight -= 0.1 * words.weight.grad

    if not in_lanes:
        steps(None)
    else:
        with lockstep.start(lanes=LANES) as run:
            run.replicate(words)
            steps(run)
    return words.weight.flatten().tolist()


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_parameter_may_have_another_shape_in_the_next_step(num_workers: int) -> None:
    plain = grown(in_lanes=False)
    for found in on_workers(num_workers, grown):
        assert found == pytest.approx(plain, abs=1e-6)
