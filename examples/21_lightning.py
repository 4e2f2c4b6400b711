"""Lightning's Trainer: `strategy="lockstep"`. Clipping, a schedule, validation and checkpoints are as they were.

    python examples/21_lightning.py lit
    lockstep run -n 3 examples/21_lightning.py lit
    lockstep run -n 2 examples/21_lightning.py other lit/epoch=1-step=8.ckpt

Needs `pip install "torch-lockstep[lightning]"`. Look at the digest and at what was logged: the same on any number of
workers, and after going on from a checkpoint on another number of them.
"""

import sys

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
import lockstep.integrations.lightning  # knows the name "lockstep" from now on


class Waves(L.LightningModule):
    """Tells how many periods a noisy wave has."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 5))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        scores = self.model(x)
        loss = F.cross_entropy(scores, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("right", (scores.argmax(1) == y).float().sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.model(x), y))

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=15)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def noisy_waves(num_waves: int) -> TensorDataset:
    """Sine waves of one to five periods under noise; the label is the number of periods, from 0."""
    label = torch.randint(0, 5, (num_waves,))
    time = torch.linspace(0, 6.28, 64)
    phase = 6.28 * torch.rand(num_waves, 1)
    return TensorDataset(torch.sin((label[:, None] + 1) * time + phase) + 0.5 * torch.randn(num_waves, 64), label)


def main(folder: str, checkpoint: str | None = None) -> None:
    run = lockstep.start(lanes=4)
    train, test = DataLoader(noisy_waves(140), batch_size=32, shuffle=True), DataLoader(noisy_waves(40), batch_size=20)
    trainer = L.Trainer(
        strategy="lockstep",
        max_epochs=3,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(folder, "{epoch}-{step}", every_n_train_steps=4, save_top_k=-1)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Waves(), train, test, ckpt_path=checkpoint)
    for name, value in sorted(trainer.callback_metrics.items()):
        run.print(f"{name} {value:.6f}")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
