"""Gradients that the script changes inside a lane: refused by name, or, inside run.no_sync, the same for every lane."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from workers import on_workers, outcomes

import lockstep
from lockstep.run.run import Run

LANES = 6
X = torch.randn(13, 6, generator=torch.Generator().manual_seed(5))


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clamped_through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.clamp_(-0.01, 0.01)


def replaced(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def forgotten(model: nn.Module) -> None:
    model.zero_grad()


def zeroed(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


CHANGES = [clipped, clamped_through_data, replaced, forgotten, zeroed]


def train(change: Callable[[Run, nn.Module, torch.Tensor], None], lanes: int) -> list[Any]:
    with lockstep.start(lanes=lanes, seed=0, recover=False, bucket_bytes=256) as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.replicate(model, optimizer)
        for _ in range(3):
            for x in run.lanes(X):
                change(run, model, model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [run.step, run.digest()]


def changed_after_backward(change: Callable[[nn.Module], None], lanes: int = LANES) -> list[Any]:
    def body(_: Run, model: nn.Module, loss: torch.Tensor) -> None:
        loss.backward()
        change(model)

    return train(body, lanes)


REFUSED = re.compile(
    r"the gradient of [02]\.(weight|bias) was changed inside a lane of step 0, after its backward pass.*"
    r"Clip after the loop over run\.lanes; for gradients of a single lane.*`with run\.no_sync\(\):`"
)


@pytest.mark.parametrize(
    ("change", "num_workers", "lanes"),
    [(change, num_workers, LANES) for change in CHANGES for num_workers in (1, 3)]
    + [(clipped, 2, LANES), (clipped, 4, LANES), (clipped, 1, 1), (clipped, 2, 1)],
)
def test_a_change_after_the_backward_pass_is_refused_by_name_in_the_first_step(
    change: Callable[[nn.Module], None], num_workers: int, lanes: int
) -> None:
    found = outcomes(num_workers, changed_after_backward, change, lanes)
    result = [outcome for outcome in found if outcome.error == "Misuse"]
    assert result
    assert all(REFUSED.match(outcome.message) for outcome in result)
    assert all(outcome.error in ("Misuse", "WorkerLost") for outcome in found)


def changed_in_no_sync(change: Callable[[nn.Module], None], outside: bool, lanes: int = LANES) -> list[Any]:
    def body(run: Run, model: nn.Module, loss: torch.Tensor) -> None:
        with run.no_sync():
            loss.backward()
            if not outside:
                change(model)
        if outside:
            change(model)

    return train(body, lanes)


@pytest.mark.parametrize(
    ("change", "lanes", "outside"),
    [(clipped, LANES, False), (clipped, LANES, True), (clamped_through_data, LANES, True), (replaced, 1, True)],
)
def test_inside_no_sync_every_lane_is_changed_alike(
    change: Callable[[nn.Module], None], lanes: int, outside: bool
) -> None:
    alone = changed_in_no_sync(change, outside, lanes)
    assert alone != changed_in_no_sync(lambda _: None, outside, lanes)
    for num_workers in (2, 3, 4):
        assert on_workers(num_workers, changed_in_no_sync, change, outside, lanes) == [alone] * num_workers


def clipped_after_a_second_pass() -> list[Any]:
    def body(run: Run, model: nn.Module, loss: torch.Tensor) -> None:
        with run.no_sync():
            loss.backward()
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        clipped(model)

    return train(body, LANES)


def test_a_lane_with_no_sync_keeps_its_gradients_to_its_end() -> None:
    alone = clipped_after_a_second_pass()
    for num_workers in (2, 3):
        assert on_workers(num_workers, clipped_after_a_second_pass) == [alone] * num_workers


def clipped_by_hand() -> torch.Tensor:
    """What lanes clipped one by one come to, in plain torch."""
    model = net()
    whole = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for lane in range(LANES):
        x = X[13 * lane // LANES : 13 * (lane + 1) // LANES]
        model.zero_grad()
        model(x).square().mean().backward()
        clipped(model)
        for total, parameter in zip(whole, model.parameters(), strict=True):
            assert parameter.grad is not None
            total += len(x) / 13 * parameter.grad
    return torch.cat([total.flatten() for total in whole])


def test_lanes_clipped_one_by_one_are_what_they_are_in_plain_torch() -> None:
    with lockstep.start(lanes=LANES, seed=0) as run:
        model = net()
        run.replicate(model)
        for x in run.lanes(X):
            with run.no_sync():
                model(x).square().mean().backward()
            clipped(model)
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found, clipped_by_hand())


def zeroed_between_two_backward_passes() -> list[Any]:
    """As virtual adversarial training does: the first pass is for its own gradient only."""

    def body(_: Run, model: nn.Module, loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()

    return train(body, LANES)


def _clamp(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def changed_by_a_hook() -> list[Any]:
    """Before it arrives: a hook of the script's own, from before run.replicate."""
    with lockstep.start(lanes=LANES, seed=0) as run:
        model = net()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_clamp)
        run.replicate(model)
        for _ in range(3):
            for x in run.lanes(X):
                model(x).square().mean().backward()
        return [float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("job", [zeroed_between_two_backward_passes, changed_by_a_hook], ids=lambda job: job.__name__)
def test_what_happens_to_every_lane_before_its_last_gradient_arrives_is_legal(job: Callable[[], list[Any]]) -> None:
    alone = job()
    for num_workers in (2, 3):
        assert on_workers(num_workers, job) == [alone] * num_workers
