"""The snapshot that a worker keeps in memory: when it is taken, and when it is written."""

from pathlib import Path

import pytest
import torch

from lockstep.errors import BadArgument
from lockstep.state.checkpoints import in_memory
from lockstep.state.checkpoints.file import read
from lockstep.state.checkpoints.folder import name_of
from lockstep.state.checkpoints.in_memory import EVERY_S, SHARE, Standby
from lockstep.state.checkpoints.plan import CheckpointPlan, Every
from lockstep.state.checkpoints.saver import Checkpoints, SavingWorker
from lockstep.state.snapshot import Snapshot


class Training:
    """A run of one number, with a clock of its own. Taking a snapshot takes `cost_s`."""

    def __init__(self) -> None:
        self.weight, self.step = torch.zeros(4), 0
        self.now_s, self.cost_s = 100.0, 0.5
        self.said: list[str] = []
        self.rank, self.stands_by = 0, True

    def clock(self) -> float:
        return self.now_s

    def capture(self) -> Snapshot:
        self.now_s += self.cost_s
        return Snapshot({"w": self.weight}, {"step": self.step})

    def train(self) -> None:
        self.weight += 1
        self.step += 1

    def standby(self) -> Standby:
        return Standby(self.said.append, self.clock)

    def checkpoints(self, folder: Path) -> Checkpoints:
        worker = SavingWorker(lambda: self.rank, self.said.append, stands_by=lambda: self.stands_by)
        return Checkpoints(CheckpointPlan(folder, Every(2), 3), worker)


def kept(standby: Standby) -> list[float] | None:
    return None if standby.snapshot is None else standby.snapshot.tensors["w"].tolist()


def test_it_is_taken_at_the_end_of_a_pass_or_an_epoch_and_training_does_not_change_it() -> None:
    training = Training()
    standby = training.standby()
    training.train()
    standby.look(training.capture, is_end=False)
    assert kept(standby) is None
    standby.look(training.capture, is_end=True)
    training.train()
    assert kept(standby) == [1.0] * 4


def test_in_a_long_pass_it_is_taken_once_a_minute() -> None:
    training = Training()
    standby = training.standby()
    found = []
    for seconds in (EVERY_S - 1, 1, EVERY_S - 1, 1):
        training.train()
        training.now_s += seconds
        standby.look(training.capture, is_end=False)
        found.append(kept(standby))
    assert found == [None, [2.0] * 4, [2.0] * 4, [4.0] * 4]


def test_it_takes_no_more_than_its_share_of_the_time() -> None:
    training = Training()
    standby = training.standby()
    training.train()
    standby.look(training.capture, is_end=True)
    training.train()
    training.now_s += SHARE * training.cost_s - 0.1
    standby.look(training.capture, is_end=True)
    assert kept(standby) == [1.0] * 4
    training.now_s += 0.2
    standby.look(training.capture, is_end=True)
    assert kept(standby) == [2.0] * 4


def test_a_state_that_memory_has_no_room_for_is_not_kept_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    standby = training.standby()
    monkeypatch.setattr(in_memory, "free_bytes", lambda: 8 * training.weight.nbytes - 1)
    for _ in range(3):
        standby.look(training.capture, is_end=True)
        training.now_s += 1e9
    assert kept(standby) is None
    assert len(training.said) == 1
    assert "no snapshot is kept in memory" in training.said[0]


def test_a_state_that_cannot_be_saved_ends_no_training_and_that_is_said_once() -> None:
    """The run was not asked to save anything."""
    training = Training()
    standby = training.standby()
    standby.look(training.capture, is_end=True)

    def fail() -> Snapshot:
        raise BadArgument("tracked/seen is a object, which is neither saved nor sent")

    for _ in range(3):
        training.now_s += 1e9
        standby.look(fail, is_end=True)
    assert kept(standby) is None
    (said,) = training.said
    assert said.startswith("no snapshot is kept in memory: tracked/seen is a object, which is neither saved nor sent. ")


def test_it_is_written_when_a_worker_is_lost(tmp_path: Path) -> None:
    training = Training()
    checkpoints = training.checkpoints(tmp_path)
    training.train()
    checkpoints.stand_by(training.capture, is_end=True)
    training.train()
    checkpoints.save_standby()
    assert read(tmp_path / name_of(1)).tensors["w"].tolist() == [1.0] * 4
    checkpoints.close()


def test_it_is_not_written_where_a_checkpoint_is_newer(tmp_path: Path) -> None:
    training = Training()
    checkpoints = training.checkpoints(tmp_path)
    training.train()
    checkpoints.stand_by(training.capture, is_end=True)
    training.train()
    checkpoints.between_steps(training.step, training.capture)
    checkpoints.save_standby()
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == [name_of(2)]


@pytest.mark.parametrize("is_there", [True, False])
def test_one_of_the_step_of_the_last_checkpoint_is_written_if_that_was_lost_with_its_worker(
    tmp_path: Path, is_there: bool
) -> None:
    training = Training()
    checkpoints = training.checkpoints(tmp_path)
    training.train()
    training.train()
    training.rank = 0 if is_there else 1
    checkpoints.between_steps(training.step, training.capture)
    checkpoints.stand_by(training.capture, is_end=True)
    training.train()
    checkpoints.save_standby()
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == [name_of(2)]
    assert read(tmp_path / name_of(2)).tensors["w"].tolist() == [2.0] * 4


def test_workers_that_do_not_stand_by_keep_nothing(tmp_path: Path) -> None:
    training = Training()
    checkpoints = training.checkpoints(tmp_path)
    training.train()
    training.stands_by = False
    checkpoints.stand_by(training.capture, is_end=True)
    checkpoints.save_standby()
    checkpoints.close()
    assert list(tmp_path.iterdir()) == []
