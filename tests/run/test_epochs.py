"""Epochs from a number of the script's own, for one that has loaded a checkpoint of its own."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workers import on_workers

import lockstep
from lockstep.errors import BadArgument, Misuse


def _order(start: int) -> list[Any]:
    """Which samples each epoch has trained on, and in which order."""
    run = lockstep.start(lanes=2, seed=4)
    model = run.replicate(nn.Linear(1, 1))
    loader = run.shard(DataLoader(TensorDataset(torch.arange(12.0).view(12, 1)), batch_size=4, shuffle=True))
    seen = []
    for epoch in run.epochs(4, start=start):
        samples: list[float] = []
        for batch in loader:
            for (x,) in run.lanes(batch):
                samples += x.flatten().tolist()
                model(x).sum().backward()
        seen.append([epoch, samples])
    return seen


def test_a_run_that_starts_at_a_later_epoch_has_the_order_of_that_epoch() -> None:
    (whole,) = on_workers(1, _order, 0)
    (later,) = on_workers(1, _order, 2)
    assert [epoch for epoch, _ in later] == [2, 3]
    assert later == whole[2:]
    assert whole[0][1] != whole[2][1]


def test_a_run_that_is_under_way_cannot_start_elsewhere() -> None:
    with lockstep.start() as run:
        assert list(run.epochs(2)) == [0, 1]
        with pytest.raises(Misuse, match=r"run\.epochs\(start=5\) is for a run that begins: this one is in epoch 2"):
            list(run.epochs(9, start=5))
        assert list(run.epochs(4, start=1)) == [2, 3]


@pytest.mark.parametrize("start", [-1, True, 1.0, None])
def test_what_is_no_epoch_is_refused(start: Any) -> None:
    with lockstep.start() as run, pytest.raises(BadArgument, match="a number of epochs, 0 or more"):
        run.epochs(3, start=start)


def test_tab_shows_the_public_names_and_no_others() -> None:
    assert dir(lockstep) == sorted(lockstep.__all__)


@pytest.mark.parametrize(
    ("count", "left", "said"),
    [
        (3, [2], "at epoch 2: of its 3 epochs it has 1 left. .*: run.epochs(5) has 3 more"),
        (2, [], "at epoch 2: of its 2 epochs it has none left. .*: run.epochs(4) has 2 more"),
    ],
)
def test_a_second_loop_says_once_where_it_goes_on(
    count: int, left: list[int], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with lockstep.start() as run:
        assert list(run.epochs(2)) == [0, 1]
        assert "a second loop" not in capfd.readouterr().err
        assert list(run.epochs(count)) == left
        assert re.search(said.replace("(", r"\(").replace(")", r"\)"), capfd.readouterr().err)
        assert list(run.epochs(8)) == list(range(count, 8))
        assert "a second loop" not in capfd.readouterr().err


def test_a_second_loop_after_one_without_epochs_needs_no_word(capfd: pytest.CaptureFixture[str]) -> None:
    with lockstep.start() as run:
        assert list(run.epochs(0)) == []
        assert list(run.epochs(2)) == [0, 1]
    assert "a second loop" not in capfd.readouterr().err


@pytest.mark.parametrize(("at", "is_noted"), [(2, False), (3, True)])
def test_an_epoch_that_goes_on_behind_the_last_batch_of_its_pass_is_noted(
    at: int, is_noted: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for is_resumed in (False, True):
        with lockstep.start(lanes=2, seed=4) as run:
            model = run.replicate(nn.Linear(1, 1))
            loader = run.shard(DataLoader(TensorDataset(torch.arange(12.0).view(12, 1)), batch_size=4))
            if is_resumed:
                run.resume(tmp_path / "saved")
            for _ in run.epochs(2):
                for batch in loader:
                    for (x,) in run.lanes(batch):
                        model(x).sum().backward()
                    if run.step == at and not is_resumed:
                        run.save(tmp_path / "saved")
        assert ("that pass has no batch left" in capfd.readouterr().err) == (is_noted and is_resumed)
