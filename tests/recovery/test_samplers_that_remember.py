"""Workers that come, and runs that resume, where the sampler goes on with a generator of its own from pass to pass."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trainings
from disturbed import Arrival, Plan, disturbed
from torch.utils.data import DataLoader, Sampler
from training import Job, loader_of, make, train_step
from trainings import BATCH, NUM_SAMPLES, Counted, Training, Work
from workers import on_workers

import lockstep


class Remembering(Sampler[int]):
    def __init__(self) -> None:
        self.rng = random.Random(7)

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.sample(range(NUM_SAMPLES), NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES


def by_the_sampler(work: Work) -> None:
    trainings._train_on(work, DataLoader(Counted(work.reach), BATCH, sampler=Remembering()))


def test_a_worker_that_comes_in_the_third_epoch_draws_what_the_others_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trainings.SCRIPTS, "remembering", by_the_sampler)
    result = disturbed(Training(script="remembering", epochs=4), 2, Plan(arrivals=(Arrival(9, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


JOB = Job(epochs=4)


def train(folder: str, save_at: int) -> list[Any]:
    """The step it went on from, and the digest at its end."""
    run = lockstep.start(lanes=4, seed=3)
    model, optimizer = make(JOB)
    run.replicate(model, optimizer)
    loader = run.shard(DataLoader(loader_of(JOB).dataset, JOB.batch, sampler=Remembering()))
    began = run.resume(folder) if Path(folder).exists() else 0
    for _ in run.epochs(JOB.epochs):
        for batch in loader:
            train_step(run, JOB, model, optimizer, batch)
            if run.step == save_at:
                run.save(folder)
    return [began, run.digest()]


@pytest.mark.parametrize("step", [8, 10])
def test_a_run_that_resumes_in_the_third_epoch_draws_what_it_would_have_drawn(step: int, tmp_path: Path) -> None:
    ((_, wanted),) = on_workers(1, train, str(tmp_path / "c"), step)
    assert on_workers(2, train, str(tmp_path / "c"), 0) == [[step, wanted]] * 2
