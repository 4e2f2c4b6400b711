"""Callbacks of Lightning with attributes of their own, one of which ends the training: FOLDER [CHECKPOINT]."""

import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
import lockstep.integrations.lightning


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Stopping(Callback):
    """Counts batches, and ends the training after eleven of them."""

    def __init__(self) -> None:
        self.begun, self.ended, self.in_epoch = 0, 0, 0

    def on_train_epoch_start(self, *_: Any) -> None:
        self.in_epoch = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun += 1

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.ended, self.in_epoch = self.ended + 1, self.in_epoch + 1
        trainer.should_stop = self.ended == 11


class Averaging(Callback):
    """An average of the weights, in a dict that each fit begins anew."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.mean = {name: value.detach().clone() for name, value in module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, value in module.named_parameters():
            self.mean[name].lerp_(value.detach(), 0.1)


def main(folder: str, checkpoint: str | None = None) -> None:
    run = lockstep.start(lanes=4, seed=0, device="cpu")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(44, 4), torch.randint(0, 3, (44,)))
    stopping, averaging = Stopping(), Averaging()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = L.Trainer(
        strategy="lockstep", max_epochs=9, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[stopping, averaging, saving],
    )  # fmt: skip
    trainer.fit(Line(), DataLoader(data, batch_size=12, shuffle=True), ckpt_path=checkpoint)
    counted = [trainer.global_step, stopping.begun, stopping.ended, stopping.in_epoch]
    mean = [float(value.double().sum()) for value in averaging.mean.values()]
    run.print("CAME TO", counted, mean, run.digest())


if __name__ == "__main__":
    main(*sys.argv[1:])
