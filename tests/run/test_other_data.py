"""Workers with different data sets are told so before anything is applied; so is a run that is resumed with another."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from workers import on_workers

import lockstep
from lockstep.errors import Disagreement, Misuse

DATA = TensorDataset(torch.randn(24, 5, generator=torch.Generator().manual_seed(1)))
FORWARDS, BACKWARDS = list(range(24)), list(reversed(range(24)))


def made(indices: list[int], checked: list[int] | None = None) -> tuple[lockstep.Run, nn.Module, Any]:
    run = lockstep.start(lanes=4, seed=0)
    torch.manual_seed(2)
    model = nn.Linear(5, 1)
    run.replicate(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = run.shard(DataLoader(Subset(DATA, indices), batch_size=8))
    if checked is not None:
        run.shard(DataLoader(Subset(DATA, checked), batch_size=8))
    return run, model, loader


def train(run: lockstep.Run, model: nn.Module, batches: Any) -> None:
    for batch in batches:
        for (x,) in run.lanes(batch):
            model(x).mean().backward()


def divided_by_rank(validation_only: bool) -> str:
    own = FORWARDS[int(os.environ["RANK"]) :: 2]
    run, model, loader = made(FORWARDS, own) if validation_only else made(own)
    before = model.weight.detach().clone()
    with pytest.raises(Disagreement) as caught:
        train(run, model, loader)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    return str(caught.value)


@pytest.mark.parametrize("validation_only", [False, True])
def test_workers_that_divide_the_data_themselves_are_told_so(validation_only: bool) -> None:
    for words in on_workers(2, divided_by_rank, validation_only):
        assert f"the data of loader {int(validation_only)} (Subset.indices)" in words
        assert "Do not divide it by the rank: run.shard does" in words


def saved(folder: Path, num_batches: int) -> None:
    run, model, loader = made(FORWARDS)
    with run:
        for batch in loader:
            train(run, model, [batch])
            if run.step == num_batches < len(loader):
                return run.save(folder / "saved")
        return run.save(folder / "saved")


def test_a_pass_does_not_go_on_with_other_samples(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    run, model, loader = made(BACKWARDS)
    with run:
        run.resume(tmp_path / "saved")
        with pytest.raises(Misuse, match=r"the data of loader 0 \(Subset.indices\) is 24: 23, 22, .* was 24: 0, 1, "):
            train(run, model, loader)
        assert run.step == 2


@pytest.mark.parametrize(("indices", "is_noted"), [(BACKWARDS, True), (FORWARDS, False)])
def test_a_run_may_go_on_with_other_data_where_a_pass_begins(
    tmp_path: Path, indices: list[int], is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 3)
    run, model, loader = made(indices)
    with run:
        run.resume(tmp_path / "saved")
        train(run, model, loader)
        assert run.step == 6
    assert ("If the data set was not changed on purpose" in capsys.readouterr().err) == is_noted
