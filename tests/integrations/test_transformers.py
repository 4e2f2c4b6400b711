"""Hugging Face's Trainer: one digest on 1, 2 and 3 workers, with a kill, with a worker that joins, and resumed."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-integrations installs it")

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from trainer_script import Text, seen
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import lockstep
from lockstep.errors import BadArgument, Misuse
from lockstep.integrations.training_arguments import REFUSED, WORK
from lockstep.integrations.transformers import PRIVATE, LockstepTrainer

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("trainer_script.py")
STOPPING = Path(__file__).with_name("stopping_script.py")
Train = Callable[..., str]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains on so many workers, and gives the line that the script prints at its end."""

    def run(
        workers: int,
        *,
        fault: str = "",
        options: tuple[str, ...] = (),
        folder: Path,
        checkpoint: str = "",
        script: Path = SCRIPT,
        **variables: str,
    ) -> str:
        words = [str(folder), *([checkpoint] if checkpoint else [])]
        command = [
            sys.executable, "-m", "lockstep", "run", "-n", str(workers), *options,
            "--run-dir", str(tmp_path_factory.mktemp("run")), str(script), *words,
        ]  # fmt: skip
        environ = os.environ | variables | ({"LOCKSTEP_FAULT": fault} if fault else {})
        done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        if fault or variables:
            assert "was killed by SIGKILL" in done.stdout + done.stderr, "the fault never happened"
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("CAME TO")]
        return line

    return run


@pytest.fixture(scope="module")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(1, folder=tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("workers", [2, 3])
def test_a_trainer_comes_to_the_same_on_any_number_of_workers(
    train: Train, alone: str, tmp_path: Path, workers: int
) -> None:
    assert train(workers, folder=tmp_path) == alone


def test_activations_that_are_computed_again_give_the_same_bits(
    train: Train, alone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECOMPUTES", "1")
    assert train(2, folder=tmp_path) == alone


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize(("kind", "options"), [("kill", ()), ("replace", ("--no-copies",))])
def test_a_killed_worker_costs_nothing_whether_a_copy_or_a_new_process_replaces_it(
    train: Train, alone: str, tmp_path: Path, slot: int, kind: str, options: tuple[str, ...]
) -> None:
    assert train(3, fault=f"{kind} {slot} at 7", options=options, folder=tmp_path) == alone


def test_a_worker_that_is_killed_in_an_evaluation_costs_nothing(train: Train, alone: str, tmp_path: Path) -> None:
    assert train(3, folder=tmp_path, DIES="1") == alone


def test_a_training_goes_on_from_a_checkpoint_of_the_trainer_on_other_workers(
    train: Train, alone: str, tmp_path: Path
) -> None:
    for folder in ("whole", "rest"):
        (tmp_path / folder).mkdir()
    train(3, folder=tmp_path / "whole")
    for step in (3, 15):
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        assert (checkpoint / "model.safetensors").exists()
    assert train(2, folder=tmp_path / "rest", checkpoint=str(tmp_path / "whole" / "checkpoint-6")) == alone


@pytest.fixture(scope="module")
def stopped(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What early stopping comes to on one worker, and where the checkpoints are."""
    folder = tmp_path_factory.mktemp("stopped")
    return train(1, folder=folder, script=STOPPING), folder


def test_early_stopping_ends_at_the_same_step_with_a_worker_that_joins(
    train: Train, stopped: tuple[str, Path], tmp_path: Path
) -> None:
    calm, _ = stopped
    assert calm.startswith("CAME TO 12 2 ")  # of 36 steps
    options = ("--no-copies",)
    assert train(3, folder=tmp_path, script=STOPPING, fault="replace 1 at 7", options=options) == calm


def test_early_stopping_ends_at_the_same_step_in_a_training_that_is_resumed(
    train: Train, stopped: tuple[str, Path], tmp_path: Path
) -> None:
    calm, folder = stopped
    assert train(2, folder=tmp_path, script=STOPPING, checkpoint=str(folder / "checkpoint-8")) == calm


# -- against the plain Trainer, and bad input ---------------------------------------------------------------------


class Scores(nn.Module):
    """A model of the user's own: its loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layer(input_ids.float() / 64)
        return {"loss": F.cross_entropy(scores, (labels[:, 0] > 32).long()), "scores": scores}


def _arguments(folder: Path, **others: Any) -> TrainingArguments:
    usual = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_grad_norm": 0.1}
    return TrainingArguments(
        str(folder), **{**usual, "per_device_train_batch_size": 70, "learning_rate": 0.1, **others}
    )


def test_on_one_whole_batch_a_step_is_that_of_the_plain_trainer_to_rounding(tmp_path: Path) -> None:
    """The whole data set is one batch, so both trainers read the same samples whatever their order."""
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0}
    trained = []
    for kind in (Trainer, LockstepTrainer):
        torch.manual_seed(0)
        config = GPT2Config(**shape, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1)
        model, args = GPT2LMHeadModel(config), _arguments(tmp_path, max_steps=3, optim="sgd")
        if kind is Trainer:
            Trainer(model=model, args=args, train_dataset=Text(70)).train()
        else:
            with lockstep.start(lanes=3, seed=0) as run:
                LockstepTrainer(run, model=model, args=args, train_dataset=Text(70)).train()
        trained.append({name: value.detach().clone() for name, value in model.named_parameters()})
    plain, ours = trained
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_an_evaluation_has_the_bits_of_the_plain_trainer(tmp_path: Path) -> None:
    found = []
    for kind in (Trainer, LockstepTrainer):
        with lockstep.start(lanes=3, seed=0) as run:
            torch.manual_seed(0)
            config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
            args = _arguments(tmp_path, per_device_eval_batch_size=8, include_for_metrics=["inputs", "loss"])
            options = {"model": GPT2LMHeadModel(config), "args": args, "compute_metrics": seen}
            trainer = Trainer(**options) if kind is Trainer else LockstepTrainer(run, **options)
            metrics, predicted = trainer.evaluate(Text(21)), trainer.predict(Text(13))
            found.append((metrics["eval_loss"], metrics["eval_of"], predicted.predictions.tobytes()))
    plain, ours = found
    assert plain == ours


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("auto_find_batch_size", True),
        ("train_sampling_strategy", "group_by_length"),
        ("include_num_input_tokens_seen", True),
        ("save_on_each_node", True),
        ("accelerator_config", {"split_batches": True}),
        ("ignore_data_skip", True),
        ("restore_callback_states_from_checkpoint", True),
        ("torch_empty_cache_steps", 2),
        ("dataloader_in_order", False),
        ("ddp_find_unused_parameters", True),
        ("ddp_timeout", 60),
        ("optim", "lomo"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_by_its_name(tmp_path: Path, argument: str, value: Any) -> None:
    with lockstep.start() as run, pytest.raises(BadArgument, match=argument):
        LockstepTrainer(run, model=Scores(), args=_arguments(tmp_path, **{argument: value}), train_dataset=Text(8))


def test_every_argument_works_or_is_refused_by_name() -> None:
    names = {field.name for field in fields(TrainingArguments)}
    assert names <= WORK | set(REFUSED)  # an earlier version has fewer
    assert not WORK & set(REFUSED)


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    plain = _arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    Trainer(model=Scores(), args=plain, train_dataset=Text(8)).train()
    with lockstep.start() as run, pytest.raises(BadArgument, match="no checkpoint of lockstep"):
        trainer = LockstepTrainer(run, model=Scores(), args=_arguments(tmp_path), train_dataset=Text(8))
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


class AddingUp(LockstepTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        self.losses = [*getattr(self, "losses", ()), 1.0]
        return super().compute_loss(model, inputs, *args, **options)


class OwnLoader(LockstepTrainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(Text(8), batch_size=4)


@pytest.mark.parametrize(("kind", "words"), [(AddingUp, "self.losses"), (OwnLoader, "_get_train_sampler")])
def test_what_a_subclass_cannot_do_exactly_is_refused_by_name(
    tmp_path: Path, kind: type[LockstepTrainer], words: str
) -> None:
    with lockstep.start(device="cpu") as run, pytest.raises(Misuse, match=words):
        kind(run, model=Scores(), args=_arguments(tmp_path, max_steps=1), train_dataset=Text(8)).train()


class InOrder(LockstepTrainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


class Recorded(Text):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return super().__getitem__(index)


def test_the_sampler_of_a_subclass_gives_the_order(tmp_path: Path) -> None:
    with lockstep.start(device="cpu") as run:
        data, args = Recorded(8), _arguments(tmp_path, max_steps=2, per_device_train_batch_size=4)
        InOrder(run, model=Scores(), args=args, train_dataset=data).train()
    assert data.read == list(range(8))


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Text(8)[index] for index in range(8))


def test_a_stream_begins_again_when_it_ends_before_the_last_step(tmp_path: Path) -> None:
    with lockstep.start(device="cpu") as run:
        args = _arguments(tmp_path, max_steps=5, per_device_train_batch_size=4)
        trainer = LockstepTrainer(run, model=Scores(), args=args, train_dataset=Stream())
        trainer.train()
        assert trainer.state.global_step == run.step == 5
        assert trainer.evaluate(Stream())["eval_loss"] == trainer.evaluate(Text(8))["eval_loss"]


def test_hyperparameter_search_is_refused(tmp_path: Path) -> None:
    with lockstep.start() as run, pytest.raises(Misuse, match="several trainings of one run"):
        LockstepTrainer(run, model=Scores(), args=_arguments(tmp_path)).hyperparameter_search()


def test_the_run_comes_first(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="takes the run"):
        LockstepTrainer(Scores(), args=_arguments(tmp_path))  # type: ignore[arg-type]


def test_the_methods_that_are_replaced_are_there() -> None:
    moved = [name for name in PRIVATE if not callable(getattr(Trainer, name, None))]
    assert moved == []
