"""Checkpoints that a run takes by itself: from whichever it goes on, it ends with the same bits."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from training import Job, loader_of, make, train_step
from workers import on_workers, outcomes

import lockstep
from lockstep.errors import BadCheckpoint, Disagreement
from lockstep.events import Note
from lockstep.state.checkpoints.file import read_manifest
from lockstep.state.checkpoints.folder import name_of, newest_good
from lockstep.state.checkpoints.plan import CheckpointPlan, Every
from lockstep.state.checkpoints.resume import begin
from lockstep.state.checkpoints.saver import AutomaticSaver, SavingWorker

JOB = Job("conv", epochs=2, augment=True)
STEPS = 8
EACH_STEP = Every(1)


class Trainer:
    """A script with all that a resume can get wrong: a schedule, draws outside of lanes, evaluation, two loaders."""

    def __init__(self, **told: int) -> None:
        self.run = lockstep.start(**told)
        self.said: list[str] = []
        self.run._events.subscribe(self._listen)
        self.model, self.optimizer = make(JOB)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)
        self.run.replicate(self.model, self.optimizer, scheduler=self.scheduler)
        self.first, self.second, self.evaluation = (self.run.shard(loader_of(JOB)) for _ in range(3))
        self.saving: AutomaticSaver | None = None
        self.at_moment: Callable[[], object] = lambda: None
        self.now_s = 0.0
        self.seconds_before: dict[int, Callable[[], float]] = {}

    def checkpoints(self, folder: Path, every: Every = EACH_STEP, keep: int = 99, resume: str = "auto") -> int:
        """What `run.checkpoints` does."""
        run = self.run
        plan = CheckpointPlan(folder, every, keep, resume)
        worker, clock = SavingWorker(lambda: run.rank, self._say), lambda: self.now_s
        wire = run.guard.generation.wire
        self.saving = begin(plan, run._state, run._settings, wire, worker, lambda: self.at_moment(), clock=clock)
        run.guard.formation.deal()
        run._events.subscribe(self.saving.on_event)
        for index, loader in run._progress.loaders.items():
            loader._lanes = partial(self._lanes_to_load, index, loader._lanes)
        return run.step

    def train(self) -> str:
        for _ in self.run.epochs(JOB.epochs):
            for batch, other in zip(self.first, self.second, strict=True):
                train_step(self.run, JOB, self.model, self.optimizer, batch if torch.rand(1) > 0.5 else other)
                if self.run.step % 3 == 0:
                    self._evaluate()
            self.scheduler.step()
            torch.rand(3)
        return self.run.digest()

    def wait_for_every_save(self) -> None:
        assert self.saving is not None
        self.at_moment = lambda: self.saving.checkpoints._writer.wait(20)

    def close(self) -> None:
        if self.saving is not None:
            self.saving.close()
        self.run.close()

    def _evaluate(self) -> None:
        with torch.no_grad():
            for batch in self.evaluation:
                for x, _ in self.run.lanes(batch, train=False):
                    self.model(x)

    def _lanes_to_load(self, index: int, lanes: Callable[[], Sequence[int]]) -> Sequence[int]:
        assert self.saving is not None
        self.now_s += self.seconds_before.get(index, float)()
        self.saving.loader_asks(index)
        return lanes()

    def _say(self, text: str) -> None:
        self.run._events.note(text)

    def _listen(self, event: object) -> None:
        if isinstance(event, Note) and not event.text.startswith("BatchNorm sees"):
            self.said.append(event.text)


def undisturbed() -> str:
    return Trainer(lanes=4, seed=3).train()


@pytest.fixture(scope="module")
def wanted() -> str:
    (digest,) = on_workers(1, undisturbed)
    return str(digest)


def train(folder: str, **options: Any) -> list[Any]:
    """[step it went on from, digest at the end, what was said] of a run that saves after every step."""
    trainer = Trainer(lanes=4, seed=3)
    step = trainer.checkpoints(Path(folder), **options)
    trainer.wait_for_every_save()
    digest = trainer.train()
    trainer.close()
    return [step, digest, trainer.said]


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of all steps of one run."""
    folder = tmp_path_factory.mktemp("run")
    on_workers(1, train, str(folder))
    return folder


def train_in_own_folder(folders: Sequence[str], **options: Any) -> list[Any]:
    return train(folders[int(os.environ["RANK"])], **options)


def train_from_each(folder: str, elsewhere: str) -> dict[str, str]:
    """The digest at the end of a run that goes on from each checkpoint in `folder`, by its name."""
    found = {}
    for place in sorted(Path(folder).iterdir()):
        trainer = Trainer()
        trainer.checkpoints(Path(elsewhere), resume=str(place), every=Every(1000))
        found[place.name] = trainer.train()
        trainer.close()
    return found


def test_saving_changes_no_bit(tmp_path: Path, wanted: str) -> None:
    assert [digest for _, digest, _ in on_workers(2, train, str(tmp_path))] == [wanted] * 2


def test_from_every_checkpoint_of_a_run_its_end_is_reached_with_the_same_bits(
    one_run: Path, tmp_path: Path, wanted: str
) -> None:
    (ends,) = on_workers(1, train_from_each, str(one_run), str(tmp_path))
    assert ends == {name_of(step): wanted for step in range(1, STEPS + 1)}


def test_a_save_that_becomes_due_between_two_loaders_of_a_step_waits_for_the_next_step(
    tmp_path: Path, wanted: str
) -> None:
    on_workers(1, train_with_time_passing_between_loaders, str(tmp_path / "c"))
    (ends,) = on_workers(1, train_from_each, str(tmp_path / "c"), str(tmp_path / "none"))
    assert len(ends) > 3
    assert set(ends.values()) == {wanted}


def train_with_time_passing_between_loaders(folder: str) -> None:
    """A minute passes in every other step, after the first loader has handed out its batch."""
    trainer = Trainer(lanes=4, seed=3)
    trainer.checkpoints(Path(folder), every=Every(minutes=1))
    trainer.wait_for_every_save()
    trainer.seconds_before = {1: lambda: 60.0 * (trainer.run.step % 2)}
    trainer.train()
    trainer.close()


def train_and_die_while_saving(folder: str, step: int, call: int, all_die: bool) -> str:
    """Worker 0 is killed at call number `call` that the writer makes for `step`; with `all_die` the others are too."""
    trainer = Trainer(lanes=4, seed=3)
    trainer.checkpoints(Path(folder))
    trainer.wait_for_every_save()
    made = 0

    def count(event: str, _: object) -> None:
        nonlocal made
        if trainer.run.step == step and event.startswith(("os.", "open", "fcntl.", "tempfile.", "shutil.")):
            made += 1
            if made == call:
                os.kill(os.getpid(), signal.SIGKILL)

    def die_at_the_step() -> None:
        if trainer.run.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    if trainer.run.rank == 0:
        sys.addaudithook(count)
    elif all_die:
        trainer.at_moment = die_at_the_step
    digest = trainer.train()
    trainer.close()
    return digest


@pytest.mark.parametrize(
    ("before", "after", "call"),
    [
        (3, 2, 5),
        (2, 3, 9),
        *(
            pytest.param(before, 1 + call % 3, call, marks=pytest.mark.soak)
            for call in range(1, 30)
            for before in (1, 2)
        ),
    ],
)
def test_a_run_killed_while_saving_resumes_on_other_workers_with_the_same_bits(
    tmp_path: Path, wanted: str, before: int, after: int, call: int
) -> None:
    killed = outcomes(before, train_and_die_while_saving, str(tmp_path), 7, call, all_die=True)
    assert {outcome.killed_by for outcome in killed} == {signal.SIGKILL}
    for step, digest, _ in on_workers(after, train, str(tmp_path)):
        assert step in (6, 7)
        assert digest == wanted
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir())


def test_when_the_worker_that_saves_is_killed_another_saves_from_then_on(tmp_path: Path, wanted: str) -> None:
    killed, *survivors = outcomes(3, train_and_die_while_saving, str(tmp_path), 7, 5, all_die=False)
    assert killed.killed_by == signal.SIGKILL
    assert [outcome.value for outcome in survivors] == [wanted] * 2
    assert newest_good(tmp_path) == (tmp_path / name_of(STEPS), [])


def put(folder: Path, one_run: Path, *steps: int) -> None:
    """Leaves the checkpoints of `steps` in `folder`."""
    for step in steps:
        shutil.copytree(one_run / name_of(step), folder / name_of(step))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_is_used(one_run: Path, tmp_path: Path, wanted: str) -> None:
    put(tmp_path, one_run, 4, 7)
    damage(tmp_path / name_of(7) / "tensors-000.safetensors")
    first, second = on_workers(2, train, str(tmp_path))
    assert first[:2] == second[:2] == [4, wanted]
    assert any(f"{name_of(7)}: tensors-000.safetensors is damaged" in text for text in first[2])


def test_without_a_checkpoint_the_run_says_that_it_starts_from_the_beginning(tmp_path: Path, wanted: str) -> None:
    ((step, digest, said),) = on_workers(1, train, str(tmp_path))
    assert (step, digest) == (0, wanted)
    assert any("starts from the beginning" in text for text in said)


def test_never_resume_starts_from_the_beginning_although_there_are_checkpoints(
    one_run: Path, tmp_path: Path, wanted: str
) -> None:
    put(tmp_path, one_run, 4)
    ((step, digest, _),) = on_workers(1, train, str(tmp_path), resume="never")
    assert (step, digest) == (0, wanted)


def test_workers_without_the_folder_are_given_the_checkpoint_by_worker_0(
    one_run: Path, tmp_path: Path, wanted: str
) -> None:
    put(tmp_path / "a", one_run, 5)
    folders = [str(tmp_path / name) for name in ("a", "b", "c")]
    found = on_workers(3, train_in_own_folder, folders)
    assert [(step, digest) for step, digest, _ in found] == [(5, wanted)] * 3
    assert any("sent to workers that cannot read it: 1, 2" in text for text in found[0][2])


def test_a_worker_with_another_checkpoint_of_the_same_name_is_given_worker_0s(
    one_run: Path, tmp_path: Path, wanted: str
) -> None:
    put(tmp_path / "a", one_run, 5)
    put(tmp_path / "b", one_run, 6)
    (tmp_path / "b" / name_of(6)).rename(tmp_path / "b" / name_of(5))
    folders = [str(tmp_path / name) for name in ("a", "b")]
    found = on_workers(2, train_in_own_folder, folders)
    assert [(step, digest) for step, digest, _ in found] == [(5, wanted)] * 2


def test_a_checkpoint_that_is_not_there_is_an_error_with_the_same_words_on_all_workers(tmp_path: Path) -> None:
    first, second = outcomes(2, train, str(tmp_path), resume=str(tmp_path / "absent"))
    assert first.error == second.error == BadCheckpoint.__name__
    assert first.message == second.message
    assert "there is no checkpoint at" in first.message


def test_workers_that_are_told_different_things_are_refused(tmp_path: Path) -> None:
    found = outcomes(2, train_told_differently, str(tmp_path))
    assert {outcome.error for outcome in found} == {Disagreement.__name__}
    assert "workers disagree on checkpoints kept" in found[0].message


def train_told_differently(folder: str) -> None:
    train(folder, keep=1 + int(os.environ["RANK"]))


def test_a_state_that_cannot_be_saved_is_refused_before_training(tmp_path: Path) -> None:
    (outcome,) = outcomes(1, begin_with_a_function, str(tmp_path))
    assert "tracked/odd/f is a function" in outcome.message


class Odd:
    def state_dict(self) -> dict[str, Any]:
        return {"f": lambda: None}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def begin_with_a_function(folder: str) -> None:
    trainer = Trainer()
    trainer.run.replicate(trainer.model, trainer.optimizer, odd=Odd())
    trainer.checkpoints(Path(folder))


def test_a_loop_without_loaders_or_epochs_is_told_that_nothing_saves_it(tmp_path: Path) -> None:
    ((said, saved_here),) = on_workers(1, train_by_hand, str(tmp_path), False)
    assert [text.startswith("no checkpoint is saved by itself") for text in said[1:]] == [True]
    assert saved_here == []


def test_a_loop_without_loaders_is_saved_at_the_end_of_its_epochs_and_goes_on_at_the_next(tmp_path: Path) -> None:
    ((said, saved_here),) = on_workers(1, train_by_hand, str(tmp_path), True)
    assert len(said) == 1
    assert saved_here == [name_of(2), name_of(4)]
    assert on_workers(1, epochs_from, str(tmp_path / name_of(2))) == [[1]]


def epochs_from(path: str) -> list[int]:
    trainer = Trainer()
    trainer.checkpoints(Path(path).parent, resume=path)
    return list(trainer.run.epochs(2))


def train_by_hand(folder: str, in_epochs: bool) -> list[Any]:
    trainer = Trainer(lanes=2)
    trainer.checkpoints(Path(folder))
    trainer.wait_for_every_save()
    for _ in trainer.run.epochs(2) if in_epochs else range(2):
        for _ in range(2):
            batch = torch.randn(8, 12), torch.randint(0, 5, (8,))
            train_step(trainer.run, JOB, trainer.model, trainer.optimizer, batch)
    trainer.close()
    return [trainer.said, sorted(path.name for path in Path(folder).iterdir())]


def test_nothing_is_unpickled_by_saving_resuming_or_handing_over(one_run: Path, tmp_path: Path) -> None:
    put(tmp_path / "a", one_run, 5)
    for events in on_workers(2, pickles_seen, [str(tmp_path / name) for name in ("a", "b")]):
        assert events == []


def pickles_seen(folders: Sequence[str]) -> list[str]:
    seen = []
    sys.addaudithook(lambda event, _: seen.append(event) if event == "pickle.find_class" else None)
    train_in_own_folder(folders)
    assert newest_good(Path(folders[0])).path is not None
    return seen


def test_the_manifest_of_a_run_has_its_lanes_and_seed(one_run: Path, tmp_path: Path) -> None:
    put(tmp_path, one_run, 5)
    manifest = read_manifest(tmp_path / name_of(5))
    assert manifest["run"] == {"lanes": 4, "seed": 3}
    assert manifest["step"] == 5
