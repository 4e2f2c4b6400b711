"""The promise holds for LARS and LAMB: the same bits on any number of workers, and after a resume."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from training import Convolutional, data
from workers import on_workers

import lockstep
from lockstep.optim.groups import exclude_biases_and_norms
from lockstep.optim.lamb import LAMB
from lockstep.optim.lars import LARS

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lars": lambda groups: LARS(groups, lr=1.0, trust_coefficient=0.02, momentum_correction=True),
    "lamb": lambda groups: LAMB(groups, lr=0.01),
}


def digest_after(name: str, first: int, last: int, folder: str | None = None) -> str:
    """Trains from step `first`, resumed from the folder, to step `last`, and saves there."""
    run = lockstep.start(lanes=8, seed=3)
    torch.manual_seed(11)
    model = Convolutional()
    optimizer = OPTIMIZERS[name](exclude_biases_and_norms(model, 1e-3))
    run.replicate(model, optimizer)
    if first and folder:
        run.resume(folder)
    x, y = data()
    for step in range(first, last):
        optimizer.param_groups[0]["lr"] *= 0.9
        here = slice(15 * step, 15 * step + 15)  # 15 samples in 8 lanes: uneven
        for x_lane, y_lane in run.lanes((x[here], y[here])):
            F.cross_entropy(model(x_lane), y_lane).backward()
        optimizer.step()
        optimizer.zero_grad()
    if folder:
        run.save(folder)
    return run.digest()


@functools.cache
def alone(name: str) -> str:
    return on_workers(1, digest_after, name, 0, 10)[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_digest_on_1_2_and_3_workers(name: str) -> None:
    assert on_workers(2, digest_after, name, 0, 10) == [alone(name)] * 2
    assert on_workers(3, digest_after, name, 0, 10) == [alone(name)] * 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resume_on_another_number_of_workers_gives_the_digest_of_one_run(name: str, tmp_path: Path) -> None:
    on_workers(2, digest_after, name, 0, 4, str(tmp_path / "saved"))
    assert on_workers(1, digest_after, name, 4, 10, str(tmp_path / "saved")) == [alone(name)]
