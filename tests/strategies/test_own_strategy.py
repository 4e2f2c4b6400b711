"""A strategy of a user's own: the run calls its engine's hooks, saves what it adds to a snapshot, and gives it back."""

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from own_strategy import MEAN, Counting, CountingEngine
from torch import nn
from workers import on_workers, outcomes

import lockstep
from lockstep.run.run import Run
from lockstep.state.checkpoints.file import read_state

X = torch.linspace(-1, 1, 24).reshape(6, 4)


def _begin(strategy: Any) -> tuple[Run, nn.Module, torch.optim.Optimizer]:
    run = lockstep.start(lanes=2, strategy=strategy)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.replicate(model, optimizer)
    return run, model, optimizer


def _train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, until: int) -> None:
    while run.step < until:
        for x in run.lanes(X):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _found(run: Run) -> dict[str, Any]:
    engine = cast(CountingEngine, run._engine)
    mean = engine.mean.tolist()
    return {"calls": engine.calls, "held": engine.held, "updates": engine.num_updates, "mean": mean, "step": run.step}


def _straight(until: int) -> dict[str, Any]:
    run, *training = _begin(Counting())
    _train(run, *training, until)
    return {**_found(run), "digest": run.digest()}


def _saved(path: str) -> dict[str, Any]:
    run, *training = _begin(Counting())
    _train(run, *training, 3)
    run.save(path)
    return _found(run)


def _resumed(path: str, until: int) -> dict[str, Any]:
    run, *training = _begin(Counting())
    run.resume(path)
    at_resume = _found(run)["updates"], _found(run)["mean"]
    _train(run, *training, until)
    return {**_found(run), "at_resume": at_resume, "digest": run.digest()}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_calls_the_hooks_of_its_engine_around_every_update(num_workers: int) -> None:
    for found in on_workers(num_workers, _straight, 2):
        assert found["calls"] == ["hold", *(["hand_over", "before SGD", "after SGD"] * 2)]
        assert found["held"] == ["weight", "bias"]


def test_what_the_engine_adds_to_a_snapshot_stands_in_the_checkpoint(tmp_path: Path) -> None:
    on_workers(2, _saved, str(tmp_path / "saved"))
    snapshot = read_state(tmp_path / "saved")
    assert snapshot.state["strategy"] == {"num_updates": 3}
    assert snapshot.tensors[MEAN].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_resumed_run_gives_it_back_and_ends_like_one_that_was_never_stopped(tmp_path: Path, num_workers: int) -> None:
    on_workers(2, _saved, str(tmp_path / "saved"))
    straight = on_workers(1, _straight, 5)[0]
    for found in on_workers(num_workers, _resumed, str(tmp_path / "saved"), 5):
        assert found["at_resume"] == [3, [2.0, 2.0, 2.0]]
        assert found["calls"][:3] == ["hold", "load", "hand_over"]
        assert {key: found[key] for key in ("updates", "mean", "step", "digest")} == {
            key: straight[key] for key in ("updates", "mean", "step", "digest")
        }


def _resumed_apart(path: str) -> None:
    """Worker 0 under another strategy than the others."""
    run, *_ = _begin(Counting() if os.environ["RANK"] == "0" else "replicated")
    run.resume(path)


def test_workers_of_a_resumed_run_must_have_the_same_strategy(tmp_path: Path) -> None:
    on_workers(1, _saved, str(tmp_path / "saved"))
    for outcome in outcomes(2, _resumed_apart, str(tmp_path / "saved")):
        assert outcome.error == "Disagreement"
        assert "strategy" in outcome.message
        assert "counting" in outcome.message
        assert "replicated" in outcome.message
