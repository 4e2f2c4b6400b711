"""Trainings on grown batches, by real workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from training import Job, data, loader_of, make, train_epochs, train_step
from workers import on_workers

import lockstep
from lockstep.events import Note

LANES = 4
JOB = Job("conv", batch=9, epochs=2, augment=True)  # 173 samples: four global batches of 36, one of 29
PLAIN = Job("mlp", "sgd", batch=9, epochs=2, double=True)


def parts(run: lockstep.Run, job: Job, loader: Any) -> Any:
    model, optimizer = make(job)
    run.replicate(model, optimizer)
    return model, optimizer, run.shard(loader, batch="grow")


def trained() -> list[Any]:
    run = lockstep.start(lanes=LANES, seed=3)
    model, optimizer, loader = parts(run, JOB, loader_of(JOB))
    train_epochs(run, JOB, model, optimizer, loader)
    return [run.digest(), run.step]


def saved_after(num_steps: int, path: str) -> None:
    run = lockstep.start(lanes=LANES, seed=3)
    model, optimizer, loader = parts(run, JOB, loader_of(JOB))
    for batch in loader:
        train_step(run, JOB, model, optimizer, batch)
        if run.step == num_steps:
            run.save(path)
            break


def resumed(path: str) -> list[Any]:
    """Goes on from the checkpoint without having been told its lanes."""
    run = lockstep.start()
    model, optimizer, loader = parts(run, JOB, loader_of(JOB))
    run.resume(path)
    train_epochs(run, JOB, model, optimizer, loader)
    return [run.digest(), run.step]


def test_a_training_on_grown_batches_has_the_same_bits_on_any_number_of_workers() -> None:
    alone = on_workers(1, trained)
    assert alone[0][1] == 10
    assert on_workers(2, trained) + on_workers(3, trained) == alone * 5


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_training_on_grown_batches_resumed_in_the_middle_of_an_epoch_has_the_same_bits(
    tmp_path: Path, num_steps: int
) -> None:
    path = str(tmp_path / "checkpoint")
    on_workers(2, saved_after, num_steps, path)
    assert on_workers(3, resumed, path) == on_workers(1, trained) * 3


def grown_in_order() -> list[list[float]]:
    run = lockstep.start(lanes=LANES, seed=3)
    model, optimizer, loader = parts(run, PLAIN, DataLoader(TensorDataset(*data(double=True)), PLAIN.batch))
    train_epochs(run, PLAIN, model, optimizer, loader)
    return [p.flatten().tolist() for p in model.parameters()]


def plain_in_order(batch_size: int) -> list[list[float]]:
    """The loop as one would write it without lockstep."""
    model, optimizer = make(PLAIN)
    for _ in range(PLAIN.epochs):
        for x, y in DataLoader(TensorDataset(*data(double=True)), batch_size):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.flatten().tolist() for p in model.parameters()]


def test_a_training_on_grown_batches_is_that_of_a_plain_loop_with_larger_batches() -> None:
    (ours,) = on_workers(1, grown_in_order)
    (theirs,) = on_workers(1, plain_in_order, PLAIN.batch * LANES)
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(plain), rtol=1e-9, atol=1e-12)


def rates_and_notes() -> list[Any]:
    run = lockstep.start(lanes=LANES)
    notes: list[str] = []
    run._events.subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    _, optimizer, _ = parts(run, JOB, loader_of(JOB))
    return [[group["lr"] for group in optimizer.param_groups], notes]


def test_growing_changes_no_learning_rate_and_is_said_once() -> None:
    ((rates, notes),) = on_workers(1, rates_and_notes)
    assert rates == [1e-2]
    assert [note.split(";")[0] for note in notes] == [
        'batch="grow": 9 samples for each of 4 lanes, 36 in a global batch'
    ]
