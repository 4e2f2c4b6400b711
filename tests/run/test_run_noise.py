"""`run.noise`: measured in real runs, the same on any number of workers, and what plain torch computes."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from training import Mlp, PartlyUsed, data
from workers import on_workers

import lockstep
from lockstep.events import NoiseMeasured
from lockstep.lanes import share
from lockstep.optim import LAMB, NoiseScale, measure
from lockstep.optim.noise.preconditioner import preconditioner, weighted_square

LANES, BATCH, EVERY, STEPS = 4, 14, 2, 9
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "lamb": lambda parameters: LAMB(parameters, lr=0.01, weight_decay=0.1),
}


def noise_of(
    name: str, first: int = 0, last: int = STEPS, folder: str | None = None, model: Any = Mlp, **options: Any
) -> list[Any]:
    """The numbers after each measured step, from all that a run tells."""
    run = lockstep.start(lanes=LANES, seed=3, noise_every=EVERY, **options)
    torch.manual_seed(11)
    trained = model()
    optimizer = OPTIMIZERS[name](trained.parameters())
    run.replicate(trained, optimizer)
    result: list[Any] = []
    run._events.subscribe(lambda event: result.append(_listed(event)) if isinstance(event, NoiseMeasured) else None)
    if first and folder:
        run.resume(folder)
    x, y = data()
    for step in range(first, last):
        here = slice(BATCH * step, BATCH * (step + 1))
        for x_lane, y_lane in run.lanes((x[here], y[here])):
            F.cross_entropy(trained(x_lane), y_lane).backward()
        optimizer.step()
        optimizer.zero_grad()
    if folder:
        run.save(folder)
    return [result, list(dataclasses.astuple(run.noise))]


def _listed(event: NoiseMeasured) -> list[Any]:
    seen = None if event.preconditioned is None else list(dataclasses.astuple(event.preconditioned))
    return [event.step, event.num_lanes, event.optimizer, list(dataclasses.astuple(event.plain)), seen]


@functools.cache
def alone(name: str) -> list[Any]:
    return on_workers(1, noise_of, name)[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_noise_is_the_same_bits_on_any_number_of_workers(name: str, num_workers: int) -> None:
    assert on_workers(num_workers, noise_of, name, bucket_bytes=600) == [alone(name)] * num_workers


def test_lanes_that_use_other_parameters_give_the_same_bits_too() -> None:
    found = [on_workers(size, noise_of, "adam", model=PartlyUsed) for size in (1, 3)]
    assert found[1] == found[0] * 3


def test_a_resumed_run_goes_on_with_its_noise(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    on_workers(2, noise_of, "adam", 0, 5, folder)
    assert on_workers(1, noise_of, "adam", 5, STEPS, folder)[0][1] == alone("adam")[1]


def test_it_is_measured_in_every_so_many_steps_after_the_first() -> None:
    assert [result[0] for result in alone("sgd")[0]] == [2, 4, 6, 8]


def test_one_lane_tells_nothing_of_noise() -> None:
    def job() -> int:
        run = lockstep.start(lanes=1, noise_every=1)
        model = Mlp()
        run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = data()
        for _ in range(3):
            for x_lane, y_lane in run.lanes((x[:8], y[:8])):
                F.cross_entropy(model(x_lane), y_lane).backward()
        return run.noise.count

    assert on_workers(1, job) == [0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_what_plain_torch_computes_from_the_lanes_gradients(name: str) -> None:
    result, _ = alone(name)
    plain, seen = by_hand(name)
    for step, _, family, smoothed, preconditioned in result:
        assert family == ("sgd" if name == "sgd" else "adam")
        assert smoothed == pytest.approx(list(dataclasses.astuple(plain[step])), rel=1e-4)
        if name == "sgd":
            assert preconditioned is None
        else:
            assert preconditioned == pytest.approx(list(dataclasses.astuple(seen[step])), rel=1e-4)


def by_hand(name: str) -> tuple[dict[int, Any], dict[int, Any]]:
    """The same training without lockstep: lane by lane, in float64 sums."""
    torch.manual_seed(11)
    model = Mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    parameters = list(model.parameters())
    scales = NoiseScale(), NoiseScale(preconditioned=True)
    found: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    x, y = data()
    for step in range(STEPS):
        lanes, weights = {}, {}
        for lane in range(LANES):
            here = share(BATCH, lane, LANES)
            at = slice(BATCH * step + here.start, BATCH * step + here.stop)
            lanes[lane] = torch.autograd.grad(F.cross_entropy(model(x[at]), y[at]), parameters)
            weights[lane] = float(len(here))
        whole = [sum(weights[v] / BATCH * lanes[v][i] for v in lanes) for i in range(len(parameters))]
        if step and step % EVERY == 0:
            for kind, scale in enumerate(scales):
                ps = [preconditioner(optimizer, parameter) if kind else None for parameter in parameters]
                squares = {v: _square(gradients, ps) for v, gradients in lanes.items()}
                scale.add(step, BATCH, measure(squares, weights, _square(whole, ps)))
                found[kind][step] = scale.noise
        for parameter, gradient in zip(parameters, whole, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return found


def _square(gradients: Any, ps: Any) -> float:
    return sum(float(weighted_square(g.double(), p)) for g, p in zip(gradients, ps, strict=True))
