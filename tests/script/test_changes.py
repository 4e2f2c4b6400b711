"""What a script changes between a batch and run.save is named; what it only reads is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from workers import on_workers

import lockstep
from lockstep.errors import Misuse
from lockstep.script.restart.changes import changed, marks_of
from lockstep.state.models import Models


class Count:
    """Something tracked that the run knows nothing about."""

    def __init__(self) -> None:
        self.number, self.words = 0, "none"

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Parts:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), torch.tensor(0.5))
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(other, 9)
        self.average, self.count = AveragedModel(self.model), Count()
        self.models = Models()
        tracked = {"scheduler": self.scheduler, "average": self.average, "count": self.count}
        self.models.add(self.model, [self.optimizer], tracked)


def _scale(parts: Parts) -> None:
    with torch.no_grad():
        parts.model.bias.mul_(0.5)


def _set_rate(parts: Parts) -> None:
    parts.optimizer.param_groups[0]["lr"] = 0.25


def _fill_rate(parts: Parts) -> None:
    parts.optimizer.param_groups[0]["lr"].fill_(0.25)


def _count(parts: Parts) -> None:
    parts.count.number += 1


def _schedule(parts: Parts) -> None:
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        parts.scheduler.step()


def _freeze(parts: Parts) -> None:
    parts.model.eval().requires_grad_(False)


def _forget_gradients(parts: Parts) -> None:
    parts.model(torch.ones(2)).sum().backward()
    parts.optimizer.zero_grad()
    parts.count.words = "many"


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (_scale, "the parameters of optimizer"),
        (_set_rate, "the rates of optimizer"),
        (_fill_rate, "the rates of optimizer"),
        (_schedule, "`scheduler`"),
        (lambda parts: parts.average.update_parameters(parts.model), "`average`"),
        (_count, "`count`"),
        (_freeze, None),
        (_forget_gradients, None),
    ],
)
def test_the_first_change_is_named(act: Callable[[Parts], object], named: str | None) -> None:
    parts = Parts()
    before = marks_of(parts.models)
    act(parts)
    assert changed(before, marks_of(parts.models)) == named


def test_what_is_tracked_only_since_then_has_not_changed() -> None:
    parts = Parts()
    before = marks_of(parts.models)
    parts.models.add(nn.Linear(1, 1), [], {"other": Count()})
    assert changed(before, marks_of(parts.models)) is None


def save_in_a_body(folder: str, strategy: str, place: str) -> str:
    """What run.save says in an epoch whose body evaluates, decays weights and trains; "" if it saves."""
    with lockstep.start(lanes=2, seed=0, strategy=strategy) as run:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        run.replicate(model, optimizer)
        loader = run.shard(DataLoader(TensorDataset(torch.randn(12, 4)), 4))
        try:
            for _ in run.epochs(2):
                for batch in loader:
                    with torch.no_grad():
                        for x in run.lanes(torch.ones(4, 4), train=False):
                            model(x)
                    if place == "behind":
                        with torch.no_grad():
                            model.weight.mul_(0.9)
                    if place != "at the end":
                        run.save(Path(folder) / "c")
                    for (x,) in run.lanes(batch):
                        model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if place == "at the end":
                        with torch.no_grad():
                            model.weight.mul_(0.9)
                        run.save(Path(folder) / "c")
        except Misuse as refusal:
            return str(refusal)
        return ""


@pytest.mark.parametrize("place", ["before", "behind", "at the end"])
@pytest.mark.parametrize("strategy", ["replicated", "sharded:parameters"])
def test_a_save_behind_a_change_is_refused_on_every_worker(tmp_path: Path, strategy: str, place: str) -> None:
    for said in on_workers(2, save_in_a_body, str(tmp_path), strategy, place):
        assert ("run.save behind a change of the parameters of optimizer" in said) == (place == "behind"), said
