"""A run that was saved and resumed, on any number of workers, has the bits of one that was never stopped."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from training import Job, loader_of, make, train_step
from workers import on_workers

import lockstep
from lockstep.state.checkpoints.in_memory import HostCopies

JOB = Job("conv", epochs=4, augment=True)


def train_and_save(folder: str, save_at: int, lanes: int = 6, stop: bool = False) -> str:
    """Trains JOB; saves after step `save_at`, in the middle of an epoch or at its end."""
    run = lockstep.start(lanes=lanes, seed=3)
    model, optimizer, scheduler, loader = _parts(run)
    for _ in run.epochs(JOB.epochs):
        for batch in loader:
            train_step(run, JOB, model, optimizer, batch)
            torch.rand(3)  # code outside of lanes draws too
            if run.step == save_at:
                run.save(Path(folder) / "checkpoint")
                if stop:
                    return run.digest()
        scheduler.step()
    return run.digest()


def resume_and_finish(folder: str, told: dict[str, int]) -> list[Any]:
    run = lockstep.start(**told)
    model, optimizer, scheduler, loader = _parts(run)
    step = run.resume(Path(folder) / "checkpoint")
    for _ in run.epochs(JOB.epochs):
        for batch in loader:
            train_step(run, JOB, model, optimizer, batch)
            torch.rand(3)
        scheduler.step()
    return [step, run.lane_count, run.digest()]


def _parts(run: lockstep.Run) -> tuple[Any, ...]:
    model, optimizer = make(JOB)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    run.replicate(model, optimizer, scheduler=scheduler)
    return model, optimizer, scheduler, run.shard(loader_of(JOB))


@cache
def digest_undisturbed() -> str:
    """Of a run that is neither saved nor stopped."""
    return str(on_workers(1, train_and_save, "", -1)[0])


@pytest.mark.parametrize("save_at", [1, 6, 8], ids=["first step", "middle of an epoch", "last batch of an epoch"])
def test_resume_on_another_number_of_workers_ends_with_the_same_bits(tmp_path: Path, save_at: int) -> None:
    undisturbed = digest_undisturbed()
    on_workers(3, train_and_save, str(tmp_path), save_at, stop=True)
    assert on_workers(2, resume_and_finish, str(tmp_path), {}) == [[save_at, 6, undisturbed]] * 2


@pytest.mark.parametrize("save_at", [0, 3])
def test_what_a_body_draws_before_it_saves_it_draws_again(tmp_path: Path, save_at: int) -> None:
    (whole,) = on_workers(1, train_with_a_coin, str(tmp_path), save_at, resumes=False)
    on_workers(2, train_with_a_coin, str(tmp_path), save_at, resumes=False)
    assert on_workers(3, train_with_a_coin, str(tmp_path), save_at, resumes=True) == [whole] * 3


def train_with_a_coin(folder: str, save_at: int, resumes: bool) -> list[Any]:
    """Draws, saves, and trains on a batch, in this order. Returns the step at the end, and the digest."""
    run = lockstep.start(lanes=6, seed=3)
    model, optimizer, _, loader = _parts(run)
    if resumes:
        run.resume(Path(folder) / "c")
    for _ in run.epochs(2):
        strength = torch.rand(())
        for batch in loader:
            coin = torch.rand(())
            if run.step == save_at and not resumes:
                run.save(Path(folder) / "c")
            for x, y in run.lanes(batch):
                (strength * coin * torch.nn.functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [run.step, run.digest()]


def test_a_resumed_run_keeps_its_lanes_and_seed_without_being_told(tmp_path: Path) -> None:
    assert on_workers(1, train_and_save, str(tmp_path), 5) == [digest_undisturbed()]
    assert on_workers(1, resume_and_finish, str(tmp_path), {})[0] == [5, 6, digest_undisturbed()]


def test_a_checkpoint_saved_at_the_end_of_an_epochs_body_resumes_at_the_next_epoch(tmp_path: Path) -> None:
    (told,) = on_workers(1, _epochs_seen_after_saving_in_epoch_1, str(tmp_path))
    assert told == [[0, 1], [2, 3]]


def test_a_checkpoint_saved_between_evaluation_and_training_resumes_inside_the_epoch(tmp_path: Path) -> None:
    assert on_workers(1, _steps_after_saving_before_training, str(tmp_path)) == [6]


def test_a_resumed_run_knows_the_loss_of_its_last_step(tmp_path: Path) -> None:
    ((before, after),) = on_workers(1, _losses_around_a_resume, str(tmp_path))
    assert before is not None
    assert before == after


def _losses_around_a_resume(folder: str) -> list[float | None]:
    losses = []
    for resumed in (False, True):
        with lockstep.start(lanes=2, seed=0) as run:
            model, _, _, loader = _parts(run)
            if resumed:
                run.resume(Path(folder) / "c")
            else:
                for x, _ in run.lanes(next(iter(loader))):
                    run.backward(model(x).mean())
                run.save(Path(folder) / "c")
            losses.append(run.loss)
    return losses


def test_a_snapshot_can_be_installed_again_after_the_run_went_on_from_it() -> None:
    ((first, second),) = on_workers(1, _digests_after_two_steps_from_one_snapshot)
    assert first == second


def _digests_after_two_steps_from_one_snapshot() -> list[str]:
    run = lockstep.start(lanes=2, seed=0)
    model, optimizer, _, loader = _parts(run)
    parts = run._state
    batches = list(zip(range(3), loader, strict=False))
    train_step(run, JOB, model, optimizer, batches[0][1])
    snapshot = HostCopies().copied(parts.capture())
    digests = []
    for _ in range(2):
        parts.install(snapshot)
        for _, batch in batches[1:]:
            train_step(run, JOB, model, optimizer, batch)
        digests.append(run.digest())
    return digests


def _steps_after_saving_before_training(folder: str) -> int:
    """Epochs that evaluate, save, then train two steps; the run is stopped after the save in epoch 1, and resumed."""
    for resumed in (False, True):
        with lockstep.start(lanes=2, seed=0) as run:
            model, optimizer, _, loader = _parts(run)
            evaluation = run.shard(loader_of(JOB))
            if resumed:
                run.resume(Path(folder) / "c")
            for epoch in run.epochs(3):
                with torch.no_grad():
                    for batch in evaluation:
                        for x, _ in run.lanes(batch, train=False):
                            model(x)
                run.save(Path(folder) / "c")
                if epoch == 1 and not resumed:
                    break
                for number, batch in enumerate(loader):
                    train_step(run, JOB, model, optimizer, batch)
                    if number == 1:
                        break
            if resumed:
                return run.step
    raise AssertionError


def _epochs_seen_after_saving_in_epoch_1(folder: str) -> list[list[int]]:
    seen: list[list[int]] = []
    for resumed in (False, True):
        with lockstep.start(lanes=2, seed=0) as run:
            model, optimizer, _, loader = _parts(run)
            if resumed:
                run.resume(Path(folder) / "c")
            seen.append([])
            for epoch in run.epochs(4):
                seen[-1].append(epoch)
                for batch in loader:
                    train_step(run, JOB, model, optimizer, batch)
                if epoch == 1 and not resumed:
                    run.save(Path(folder) / "c")
                    break
    return seen
