"""Lightning's Trainer and Fabric: one digest on 1, 2 and 3 workers, with a kill, with a worker that joins, resumed."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="Lightning is not installed: make test-integrations installs it")

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
import lockstep.integrations.lightning
from lockstep.errors import BadArgument, LockstepError, Misuse
from lockstep.integrations.lightning.refused import PRIVATE

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
SCRIPT, COUNTING = HERE / "lightning_script.py", HERE / "counting_script.py"
EXAMPLES = HERE.parent.parent / "examples"
TRAINER, FABRIC = EXAMPLES / "21_lightning.py", EXAMPLES / "22_fabric.py"
Train = Callable[..., list[str]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs a script on so many workers, and gives what the first worker printed of the training."""

    def run(workers: int, script: Path, *words: object, fault: str = "", options: tuple[str, ...] = ()) -> list[str]:
        folder = tmp_path_factory.mktemp("run")
        command = [
            sys.executable, "-m", "lockstep", "run", "-n", str(workers), *options, "--run-dir", str(folder),
            str(script), *map(str, words),
        ]  # fmt: skip
        environ = os.environ | ({"LOCKSTEP_FAULT": fault} if fault else {})
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
        assert done.returncode == 0, done.stdout + done.stderr
        if fault:
            assert "was killed by SIGKILL" in done.stdout + done.stderr, "the fault never happened"
            assert "gives its place up" not in done.stdout + done.stderr
        lines = done.stdout.splitlines()
        return [line for line in lines if line.startswith(("CAME TO", "loss", "right", "val_loss", "epoch", "digest"))]

    return run


@pytest.fixture(scope="module")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return train(1, TRAINER, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("workers", [2, 3])
def test_what_people_do_with_a_trainer_comes_to_the_same_on_several_workers(
    train: Train, tmp_path: Path, workers: int
) -> None:
    expected, found = (train(count, SCRIPT, tmp_path / str(count)) for count in (1, workers))
    assert len(expected) == 6
    assert found == expected
    (metrics,) = (tmp_path / str(workers)).rglob("metrics.csv")  # one worker has logged
    assert "val_loss" in metrics.read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("fault", "options"),
    [("kill 1 at 7", ()), ("replace 0 at 7", ("--no-copies",)), ("replace 1 at 10", ("--no-copies",))],
)
def test_a_killed_worker_costs_nothing_whether_a_copy_or_a_new_process_replaces_it(
    train: Train, alone: list[str], tmp_path: Path, fault: str, options: tuple[str, ...]
) -> None:
    assert alone[-1].startswith("digest")
    assert train(3, TRAINER, tmp_path, fault=fault, options=options) == alone


def test_a_fit_goes_on_from_a_checkpoint_of_lightning_on_another_number_of_workers(
    train: Train, alone: list[str], tmp_path: Path
) -> None:
    assert train(2, TRAINER, tmp_path) == alone
    checkpoint = tmp_path / "epoch=1-step=8.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 8
    assert train(3, TRAINER, tmp_path / "rest", checkpoint) == alone
    assert train(1, TRAINER, tmp_path / "last", tmp_path / "epoch=2-step=12.ckpt") == alone


@pytest.fixture(scope="module")
def counted(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """What callbacks with attributes come to on one worker, and where their checkpoints are."""
    folder = tmp_path_factory.mktemp("counted")
    return train(1, COUNTING, folder), folder


def test_the_attributes_of_callbacks_go_on_where_a_worker_joins(
    train: Train, counted: tuple[list[str], Path], tmp_path: Path
) -> None:
    calm, _ = counted
    assert calm[0].startswith("CAME TO [11, 11, 11, 3]")
    assert train(3, COUNTING, tmp_path, fault="replace 1 at 6", options=("--no-copies",)) == calm


def test_the_attributes_of_callbacks_go_on_where_a_fit_is_resumed(
    train: Train, counted: tuple[list[str], Path], tmp_path: Path
) -> None:
    calm, folder = counted
    assert train(2, COUNTING, tmp_path, folder / "step=6.ckpt") == calm


def test_a_loop_of_fabric_comes_to_the_same_on_several_workers_and_with_a_kill(train: Train) -> None:
    alone = train(1, FABRIC)
    assert len(alone) == 4
    assert train(3, FABRIC) == alone
    assert train(2, FABRIC, fault="replace 0 at 7", options=("--no-copies",)) == alone


# -- against the plain Trainer, and bad input ---------------------------------------------------------------------


class Scores(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.layer(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def _loader(shuffle: bool = False) -> "DataLoader[Any]":
    chance = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(30, 4, generator=chance), torch.randint(0, 2, (30,), generator=chance))
    return DataLoader(data, batch_size=8, shuffle=shuffle)


def _trainer(folder: Path, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    usual = {"max_epochs": 2, "enable_checkpointing": False, "gradient_clip_val": 0.1, "default_root_dir": folder}
    return L.Trainer(**{**quiet, **usual, **options})


def test_with_one_lane_a_fit_has_the_bits_of_the_plain_trainer(tmp_path: Path) -> None:
    trained = []
    for options in ({}, {"strategy": "lockstep"}):
        with lockstep.start(lanes=1, seed=0, device="cpu"):
            torch.manual_seed(0)
            module = Scores()
            _trainer(tmp_path, accumulate_grad_batches=2, **options).fit(module, _loader())
            trained.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    plain, ours = trained
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"devices": 2}, "devices"),
        ({"num_nodes": 2}, "num_nodes"),
        ({"sync_batchnorm": True}, "sync_batchnorm"),
        ({"max_time": "00:00:01:00"}, "max_time"),
        ({"val_check_interval": "00:00:01:00"}, "val_check_interval"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"benchmark": True}, "benchmark"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_its_name(tmp_path: Path, options: Any, name: str) -> None:
    benchmark = torch.backends.cudnn.benchmark
    try:
        with lockstep.start(device="cpu"), pytest.raises(BadArgument, match=name):
            _trainer(tmp_path, strategy="lockstep", **options).fit(Scores(), _loader())
    finally:
        torch.backends.cudnn.benchmark = benchmark


class Closures(Scores):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Skipping(Scores):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class Taking(Scores):
    def training_step(self, dataloader_iter: Any) -> None:
        next(dataloader_iter)


class Moving(Scores):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class OwnReduction(Scores):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("own", 1.0, reduce_fx=torch.median)
        return super().training_step(batch, batch_idx)


class Collecting(Scores):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss


class Counting(Scores):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.mean.update(1.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Closures, "LBFGS"),
        (Skipping, "no loss"),
        (Taking, "dataloader_iter"),
        (Moving, "on_before_batch_transfer"),
        (OwnReduction, "reduce_fx=median"),
        (Counting, "torchmetrics"),
        (Collecting, "training_step has changed self.losses"),
    ],
)
def test_a_module_that_cannot_be_exact_is_refused_before_an_update(
    tmp_path: Path, kind: type[Scores], words: str
) -> None:
    with lockstep.start(device="cpu"):
        module = kind()
        before = module.layer.weight.clone()
        with pytest.raises(LockstepError, match=words):
            _trainer(tmp_path, strategy="lockstep").fit(module, _loader())
        assert torch.equal(module.layer.weight, before)


def test_several_training_loaders_are_refused(tmp_path: Path) -> None:
    with lockstep.start(device="cpu"), pytest.raises(BadArgument, match="several training loaders"):
        _trainer(tmp_path, strategy="lockstep").fit(Scores(), {"a": _loader(), "b": _loader()})


def test_a_checkpoint_that_was_saved_elsewhere_is_refused(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, "plain", every_n_train_steps=1)
    _trainer(tmp_path, enable_checkpointing=True, callbacks=[callback]).fit(Scores(), _loader())
    with lockstep.start(device="cpu"), pytest.raises(BadArgument, match="no checkpoint of lockstep"):
        _trainer(tmp_path, strategy="lockstep").fit(Scores(), _loader(), ckpt_path=str(tmp_path / "plain.ckpt"))


def test_the_strategy_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match=r"call lockstep.start\(\)"):
        _trainer(tmp_path, strategy="lockstep")


def test_a_run_has_one_fit(tmp_path: Path) -> None:
    with lockstep.start(device="cpu"):
        trainer, module = _trainer(tmp_path, strategy="lockstep"), Scores()
        trainer.fit(module, _loader())
        with pytest.raises(Misuse, match="one fit"):
            trainer.fit(module, _loader())


def test_the_names_that_are_not_meant_for_others_are_there(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, enable_checkpointing=True)
    roots = {"Trainer": trainer, "torchmetrics": torchmetrics}
    places = {place: reduce(getattr, place.split(".")[1:], roots[place.split(".")[0]]) for place in PRIVATE}
    places["torchmetrics.Metric"] = torchmetrics.MeanMetric()
    moved = [
        f"{place}.{name}" for place, names in PRIVATE.items() for name in names if not hasattr(places[place], name)
    ]
    assert moved == []
