"""Checkpoints are written beside the training, one at a time, and no failed save ends it."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from workers import on_workers

from lockstep.state.checkpoints import saver
from lockstep.state.checkpoints.file import read, write
from lockstep.state.checkpoints.folder import name_of, newest_good
from lockstep.state.checkpoints.in_memory import HostCopies
from lockstep.state.checkpoints.plan import CheckpointPlan, Every
from lockstep.state.checkpoints.saver import Checkpoints, SavingWorker
from lockstep.state.snapshot import Snapshot


class Training:
    """A run of one number that grows by one in every step, saved every two."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.weight = torch.zeros(4)
        self.rank = 0
        self.said: list[str] = []
        worker = SavingWorker(lambda: self.rank, self.said.append)
        self.checkpoints = Checkpoints(CheckpointPlan(folder, Every(2), keep), worker)
        self.step = 0

    def capture(self) -> Snapshot:
        return Snapshot({"w": self.weight}, {"step": self.step})

    def train(self, steps: int, wait: bool = True) -> None:
        for _ in range(steps):
            self.weight += 1
            self.step += 1
            self.checkpoints.between_steps(self.step, self.capture)
            if wait:
                assert self.checkpoints._writer.wait(20)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path / "c")
    yield training
    training.checkpoints.close()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that writes nothing until the event is set."""
    released = threading.Event()

    def later(path: Path, snapshot: Snapshot, serial: int) -> str:
        released.wait(20)
        return write(path, snapshot, serial)

    monkeypatch.setattr(saver, "write", later)
    yield released
    released.set()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_checkpoints_appear_when_due_and_the_newest_are_kept(training: Training) -> None:
    training.train(10)
    assert names(training.checkpoints.folder) == [name_of(6), name_of(8), name_of(10)]


def test_a_checkpoint_holds_the_step_at_which_it_was_due_whatever_training_did_meanwhile(
    training: Training, slow_disk: threading.Event
) -> None:
    training.train(3, wait=False)
    slow_disk.set()
    training.checkpoints.close()
    assert read(training.checkpoints.folder / name_of(2)).tensors["w"].tolist() == [2.0] * 4


def test_a_save_that_is_due_while_one_is_under_way_is_put_off_and_said_once(
    training: Training, slow_disk: threading.Event
) -> None:
    training.train(7, wait=False)
    slow_disk.set()
    assert training.checkpoints._writer.wait(20)
    training.train(1)
    assert names(training.checkpoints.folder) == [name_of(2), name_of(8)]
    assert [text.split(":")[0] for text in training.said] == ["the checkpoint of step 4 waits"]


def test_a_put_off_save_is_made_at_the_first_step_that_can(training: Training, slow_disk: threading.Event) -> None:
    training.train(4, wait=False)
    slow_disk.set()
    assert training.checkpoints._writer.wait(20)
    training.train(1)
    assert names(training.checkpoints.folder) == [name_of(2), name_of(5)]


def test_only_the_worker_with_rank_0_writes(training: Training) -> None:
    training.rank = 1
    training.train(4)
    assert not training.checkpoints.folder.exists()


def test_a_worker_that_becomes_rank_0_saves_at_the_next_interval(training: Training) -> None:
    training.rank = 1
    training.train(5)
    training.rank = 0
    training.train(1)
    assert names(training.checkpoints.folder) == [name_of(6)]


def test_the_same_memory_is_used_for_every_copy() -> None:
    copies = HostCopies()
    weight = torch.randn(3, 5).T
    first = copies.copied(Snapshot({"w": weight}, {})).tensors["w"]
    again = copies.copied(Snapshot({"w": weight + 1}, {})).tensors["w"]
    assert first.data_ptr() == again.data_ptr()
    assert torch.equal(again, weight + 1)


def test_memory_follows_a_tensor_whose_form_changes() -> None:
    copies = HostCopies()
    copies.copied(Snapshot({"w": torch.zeros(3)}, {}))
    copy = copies.copied(Snapshot({"w": torch.ones(2, dtype=torch.int8), "new": torch.ones(1)}, {}))
    assert copy.tensors["w"].tolist() == [1, 1]
    assert copy.tensors["new"].tolist() == [1.0]


def failing(error: Exception, times: int) -> Callable[..., str]:
    left = [times]

    def attempt(path: Path, snapshot: Snapshot, serial: int) -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return write(path, snapshot, serial)

    return attempt


def test_a_failed_save_is_said_once_in_a_row_and_the_next_is_tried_again(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.train(2)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(saver, "write", failing(full, times=2))
    training.train(6)
    assert names(training.checkpoints.folder) == [name_of(2), name_of(8)]
    (text,) = training.said
    assert text.startswith(f"{name_of(4)} could not be saved: No space left on device")
    assert f"{name_of(2)} stays" in text


def test_an_error_that_comes_back_after_a_good_save_is_said_again(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        monkeypatch.setattr(saver, "write", failing(OSError(errno.EIO, "disk error"), times=1))
        training.train(4)
    assert len(training.said) == 2


def test_an_error_that_will_come_again_is_said_once_and_as_what_it_means(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = ModuleNotFoundError("No module named 'numpy'")
    monkeypatch.setattr(saver, "write", failing(lacking, times=3))
    training.train(7)
    (text,) = training.said
    assert text.startswith(f"{name_of(2)} could not be saved in {training.checkpoints.folder}: ModuleNotFoundError: No")
    assert "every later checkpoint fails in the same way" in text


def train_without_permission(folder: str) -> list[object]:
    training = Training(Path(folder))
    training.train(2)
    if os.geteuid() == 0:
        os.seteuid(65534)  # nothing is forbidden to root
    else:
        training.checkpoints.folder.chmod(0o500)
    training.train(4)
    return [training.step, training.said]


def test_a_folder_without_permission_does_not_end_the_training(tmp_path: Path) -> None:
    ((step, said),) = on_workers(1, train_without_permission, str(tmp_path))
    assert step == 6
    assert ["could not be saved: Permission denied" in text for text in said] == [True]


def test_a_file_in_place_of_the_folder_does_not_end_the_training(training: Training) -> None:
    training.checkpoints.folder.write_text("")
    training.train(3)
    assert "could not be saved" in training.said[0]


def test_closing_waits_for_the_writer_no_longer_than_told(training: Training, slow_disk: threading.Event) -> None:
    training.train(2, wait=False)
    training.checkpoints.close(limit_s=0.01)
    assert "still being written" in training.said[0]


def test_save_now_gives_the_path_of_a_checkpoint_that_is_there(training: Training) -> None:
    training.train(3)
    path = training.checkpoints.save_now(training.step, training.capture)
    assert path == training.checkpoints.folder / name_of(3)
    assert newest_good(training.checkpoints.folder).path == path


def test_save_now_waits_for_the_one_under_way_and_does_not_write_it_twice(training: Training) -> None:
    training.train(2, wait=False)

    def never() -> Snapshot:
        raise AssertionError("step 2 is being saved already")

    assert training.checkpoints.save_now(2, never) == training.checkpoints.folder / name_of(2)


def test_save_now_gives_up_at_its_limit(training: Training, slow_disk: threading.Event) -> None:
    assert training.checkpoints.save_now(1, training.capture, limit_s=0.01) is None


def test_save_now_does_nothing_on_other_workers(training: Training) -> None:
    training.rank = 2
    assert training.checkpoints.save_now(1, training.capture) is None
