"""Where a run takes the snapshot that it keeps for a loss in an evaluation, and where it saves."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep
from lockstep.run.autosave import Autosave
from lockstep.run.run import Run
from lockstep.state.checkpoints import in_memory
from lockstep.state.checkpoints.in_memory import Standby
from lockstep.state.checkpoints.saver import Writer
from lockstep.state.snapshot import Snapshot

DATA = TensorDataset(torch.arange(96.0).view(32, 3) / 50)
STEPS = 4
"""In a pass."""

Script = Callable[["Trained", int], None]


class Mean:
    """Shown by the script, and begun anew in each epoch."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Trained:
    """A run of its own that is saved by nothing else."""

    def __init__(self, folder: Path, every_steps: int = 10**9) -> None:
        self.run: Run = lockstep.start(lanes=4, seed=1)
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.teacher = nn.Linear(3, 1)
        self.mean = Mean()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)  # no rate changes
        self.run.replicate(self.model, self.optimizer, scheduler=self.scheduler, mean=self.mean)
        self.run.replicate(self.teacher)
        self.loaders = [self.run.shard(DataLoader(DATA, batch_size=8, shuffle=True)) for _ in range(2)]
        self.held = self.run.shard(DataLoader(DATA, batch_size=8))
        self.run.checkpoints(folder, every_steps=every_steps, keep=99)

    def train(self, loader: int = 0) -> None:
        for batch in self.loaders[loader]:
            for (x,) in self.run.lanes(batch):
                self.run.backward(self.model(x).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.mean.count += 1

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            for batch in self.held:
                for (x,) in self.run.lanes(batch):
                    self.model(x)
        self.model.train()


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The steps and epochs of the snapshots that are taken."""
    taken: list[tuple[int, int]] = []
    take = Standby._take

    def note(standby: Standby, snapshot: Snapshot) -> None:
        taken.append((snapshot.state["step"], snapshot.state["epoch"]))
        take(standby, snapshot)

    monkeypatch.setattr(Autosave, "_stands_by", lambda _: True)
    monkeypatch.setattr(in_memory, "SHARE", 0)
    monkeypatch.setattr(Standby, "_take", note)
    return taken


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(tmp_path / "checkpoints")


def _plain(trained: Trained, _: int) -> None:
    trained.train()
    trained.evaluate()


def _sets_a_rate(trained: Trained, epoch: int) -> None:
    trained.optimizer.param_groups[0]["lr"] = 0.1 / (2 + epoch)
    trained.train()


def _copies_into_the_teacher(trained: Trained, _: int) -> None:
    trained.teacher.load_state_dict(trained.model.state_dict())
    trained.train()


def _steps_the_scheduler(trained: Trained, _: int) -> None:
    trained.scheduler.step()
    trained.train()


def _begins_a_mean(trained: Trained, _: int) -> None:
    trained.mean.count = 0
    trained.train()


def _clamps_before_each_batch(trained: Trained, _: int) -> None:
    for batch in trained.loaders[0]:
        with torch.no_grad():
            trained.teacher.bias.clamp_(-1, 1)
        for (x,) in trained.run.lanes(batch):
            trained.run.backward(trained.model(x).square().mean())
        trained.optimizer.step()
        trained.optimizer.zero_grad()


def _trains_twice(trained: Trained, _: int) -> None:
    trained.train()
    trained.evaluate()
    trained.train(1)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (_plain, [(3, 0), (4, 1), (7, 1), (8, 2)]),
        (_sets_a_rate, [(4, 1), (8, 2)]),
        (_copies_into_the_teacher, [(4, 1), (8, 2)]),
        (_trains_twice, [(3, 0), (8, 1), (11, 1), (16, 2)]),
    ],
)
def test_it_is_taken_where_a_script_does_nothing_twice_that_changes_its_state(
    trained: Trained, taken: list[tuple[int, int]], body: Script, expected: list[tuple[int, int]]
) -> None:
    """Before the last batch of a pass, if it is the first of the epoch and its head has changed nothing; and at the end
    of each epoch."""
    with trained.run:
        for epoch in trained.run.epochs(2):
            body(trained, epoch)
    assert taken == expected


ENDS = [STEPS, 2 * STEPS, 3 * STEPS]
ALL = list(range(1, 3 * STEPS + 1))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (_plain, ALL),
        (_sets_a_rate, ALL),
        (_begins_a_mean, ALL),
        (_clamps_before_each_batch, ALL),
        (_copies_into_the_teacher, ENDS),
        (_steps_the_scheduler, ENDS),
    ],
)
def test_what_is_due_is_saved_where_a_run_that_goes_on_is_not_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    body: Script,
    expected: list[int],
) -> None:
    """And from any checkpoint the script ends with the same bits."""
    monkeypatch.setattr(Writer, "start", Writer._save)  # the next one that is due does not wait for a disk

    def train(folder: Path) -> tuple[str, str]:
        trained = Trained(folder, every_steps=1)
        with trained.run as run:
            for epoch in run.epochs(3):
                body(trained, epoch)
            return run.digest(), capsys.readouterr().err

    folder = tmp_path / "checkpoints"
    digest, told = train(folder)
    saved = sorted(folder.glob("step-*"))
    assert [int(path.name[5:]) for path in saved] == expected
    assert told.count("checkpoints are saved at the ends of epochs only") == (expected == ENDS)
    for path in {saved[1], saved[-2]}:  # in the middle of an epoch, if some are
        shutil.copytree(path, tmp_path / f"from {path.name}" / path.name)
        assert train(tmp_path / f"from {path.name}")[0] == digest


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(torch.arange(96.0).view(32, 3))


def test_of_a_stream_whose_end_nobody_knows_it_is_taken_at_the_ends_of_epochs(
    trained: Trained, taken: list[tuple[int, int]]
) -> None:
    with trained.run:
        trained.loaders[0] = trained.run.shard(
            DataLoader(Endless(), batch_size=8, collate_fn=lambda rows: (torch.stack(rows),))
        )
        for _ in trained.run.epochs(2):
            trained.train()
    assert taken == [(STEPS, 1), (2 * STEPS, 2)]


@pytest.mark.parametrize("at_head", [True, False])
def test_an_evaluation_at_the_head_of_an_epoch_that_goes_on_in_its_middle_is_said(
    trained: Trained, at_head: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(trained: Trained, stop: int | None = None) -> None:
        for _ in trained.run.epochs(2):
            if at_head:
                trained.evaluate()
            for batch in trained.loaders[0]:
                for (x,) in trained.run.lanes(batch):
                    trained.run.backward(trained.model(x).square().mean())
                trained.optimizer.step()
                trained.optimizer.zero_grad()
                if trained.run.step == stop:
                    trained.run.save(tmp_path / "middle")
                    return
            if not at_head:
                trained.evaluate()

    with trained.run:
        train(trained, stop=2)
    capsys.readouterr()
    again = Trained(tmp_path / "again")
    with again.run:
        again.run.resume(tmp_path / "middle")
        train(again)
    said = "the script has evaluated on loader 2 before it came there" in capsys.readouterr().err
    assert said == at_head


def test_behind_the_last_batch_of_a_pass_it_is_not_taken(
    trained: Trained, taken: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that went on there would not have the names that its loop assigns."""
    monkeypatch.setattr(in_memory, "EVERY_S", 0)
    with trained.run:
        for _ in trained.run.epochs(1):
            trained.train()
    assert taken == [(1, 0), (2, 0), (3, 0), (4, 1)]
