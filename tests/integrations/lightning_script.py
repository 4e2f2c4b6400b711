"""What people do with Lightning's Trainer, one run after the other: FOLDER. Prints what each training came to."""

import sys
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
import lockstep.integrations.lightning


class Classifier(L.LightningModule):
    """Writes down what happens to it."""

    def __init__(self, *, plateau: bool = False) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))
        self.plateau = plateau
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        x, y = batch
        scores = self.model(x)
        loss = F.cross_entropy(scores, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"most": scores.max(), "least": scores.min()}, on_epoch=True, on_step=False, reduce_fx="max")
        return {"loss": loss}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x + 0.01 * torch.randn_like(x) if self.training else x), y

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, len(batch), float(outputs["loss"])))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.model(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.plateau:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Adversaries(L.LightningModule):
    """Two optimizers, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        lanes = self.trainer.strategy.lanes
        for x, _ in lanes(batch):
            made = self.generator(torch.randn(len(x), 4)).detach()
            loss = F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(made)).mean()
            self.log("critic", loss)
            self.manual_backward(loss)
        of_critic.step()
        of_critic.zero_grad()
        for x, _ in lanes(batch):
            self.manual_backward(F.softplus(-self.critic(self.generator(torch.randn(len(x), 4)))).mean())
        of_generator.step()
        self.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.generator, self.critic)]


class Averaged(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 3


def fit(name: str, make: Callable[[], L.LightningModule], folder: str, **options: Any) -> None:
    with lockstep.start(lanes=4, seed=0, device="cpu") as run:
        module, chance = make(), torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(44, 8, generator=chance), torch.randint(0, 3, (44,), generator=chance))
        usual = {"logger": False, "enable_checkpointing": False, "max_epochs": 2}
        trainer = L.Trainer(
            strategy="lockstep", default_root_dir=f"{folder}/{name}", enable_progress_bar=False,
            enable_model_summary=False, **{**usual, **options},
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, batch_size=12, shuffle=True), DataLoader(data, batch_size=22))
        metrics = {key: float(value) for key, value in sorted(trainer.callback_metrics.items())}
        run.print("CAME TO", name, trainer.global_step, metrics, getattr(module, "seen", ""), run.digest())


def main(folder: str) -> None:
    fit("clipped-by-value", Classifier, folder, gradient_clip_val=0.1, gradient_clip_algorithm="value")
    fit("accumulated", Classifier, folder, accumulate_grad_batches=2, gradient_clip_val=0.1, val_check_interval=2)
    fit("half", Classifier, folder, precision="bf16-mixed", limit_train_batches=2)
    fit("double", lambda: Classifier().double(), folder, precision="64-true")
    callbacks = [EarlyStopping("val_loss", patience=1, min_delta=0.5), Averaged(), LearningRateMonitor()]
    best = ModelCheckpoint(monitor="val_loss", save_last=True, save_top_k=1)
    fit(
        "watched", lambda: Classifier(plateau=True), folder, callbacks=[*callbacks, best], max_epochs=6,
        enable_checkpointing=True, logger=CSVLogger(folder, "logs", flush_logs_every_n_steps=1), log_every_n_steps=1,
    )  # fmt: skip
    fit("adversaries", Adversaries, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
