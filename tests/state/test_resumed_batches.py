"""A place in the middle of a pass is counted in batches: a resumed run must have the same ones until the pass ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data import Position, ShardedLoader
from lockstep.errors import BadCheckpoint
from lockstep.state.progress import LoaderPlace

DATA = TensorDataset(torch.linspace(-1, 1, 32).reshape(16, 2))
OTHERS: list[dict[str, Any]] = [{"batch_size": 2}, {"batch_size": 8}, {"batch_size": 4, "batch": "grow"}]


def parts(run: lockstep.Run, batch_size: int = 4, batch: str = "split") -> tuple[torch.nn.Module, ShardedLoader]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    run.replicate(model, torch.optim.SGD(model.parameters(), 0.1))
    return model, run.shard(DataLoader(DATA, batch_size), batch=batch)


def saved(path: Path, num_steps: int) -> None:
    """After so many of the four batches of a pass."""
    with lockstep.start(lanes=2, seed=1) as run:
        model, loader = parts(run)
        batches = iter(loader)
        for _ in range(num_steps):
            for (x,) in run.lanes(next(batches)):
                model(x).sum().backward()
        if num_steps == len(loader):
            assert next(batches, None) is None
        run.save(path)


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_other_batches_are_refused_in_the_middle_of_a_pass_and_nothing_is_touched(tmp_path: Path, other: Any) -> None:
    saved(tmp_path / "saved", 2)
    with lockstep.start(lanes=2, seed=1) as run:
        model, loader = parts(run, **other)
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(
            BadCheckpoint, match=r"loader 0 .* 2 batches into a pass, .* batches of 4 \(batch=\"split\""
        ):
            run.resume(tmp_path / "saved")
        assert run.step == 0
        assert loader.position == Position()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_loader_that_is_made_after_the_resume_is_refused_likewise(tmp_path: Path, other: Any) -> None:
    saved(tmp_path / "saved", 2)
    with lockstep.start(lanes=2, seed=1) as run:
        model = torch.nn.Linear(2, 1)
        run.replicate(model, torch.optim.SGD(model.parameters(), 0.1))
        run.resume(tmp_path / "saved")
        options = dict(other)
        loader = DataLoader(DATA, options.pop("batch_size"))
        with pytest.raises(BadCheckpoint, match="that place cannot be found"):
            run.shard(loader, **options)
        assert run.shard(DataLoader(DATA, 4)).position == Position(0, 2)  # nothing was lost by trying


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_between_two_passes_batches_may_change(tmp_path: Path, other: Any) -> None:
    saved(tmp_path / "saved", 4)
    with lockstep.start(lanes=2, seed=1) as run:
        _, loader = parts(run, **other)
        run.resume(tmp_path / "saved")
        assert loader.position == Position(1, 0)


def test_a_checkpoint_that_does_not_say_its_batches_is_believed() -> None:
    with lockstep.start(lanes=2, seed=1) as run:
        _, loader = parts(run)
        LoaderPlace(Position(0, 2), None).check(0, loader)
