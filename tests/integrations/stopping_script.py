"""A training that ends by EarlyStoppingCallback, long before its last epoch: FOLDER [CHECKPOINT]."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, TrainingArguments

import lockstep
from lockstep.integrations.transformers import LockstepTrainer


class Points(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": (x[0] > 0).float()}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.layer(x).squeeze(1), labels)}


def main(folder: str, checkpoint: str | None = None) -> None:
    run = lockstep.start(lanes=4, seed=0, device="cpu")
    torch.manual_seed(0)
    args = TrainingArguments(
        folder, per_device_train_batch_size=10, num_train_epochs=9, learning_rate=1e-9, eval_strategy="steps",
        eval_steps=2, save_steps=2, load_best_model_at_end=True, metric_for_best_model="loss", report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = LockstepTrainer(
        run, model=Line(), args=args, train_dataset=Points(), eval_dataset=Points(),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=5, early_stopping_threshold=0.5)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    run.print("CAME TO", trainer.state.global_step, trainer.state.best_global_step, run.digest())


if __name__ == "__main__":
    main(*sys.argv[1:])
