"""Evaluation: every sample counted once, the same answer on any number of workers.

    python examples/05_evaluation.py
    lockstep run -n 3 examples/05_evaluation.py

The 1,003 test samples do not divide by anything, and the last batch has fewer samples than there
are lanes. Look at the count and at the loss: not one digit depends on the number of workers.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import Run

NUM_CLASSES = 3


def clouds(num_points: int) -> TensorDataset:
    """Points around three centres; the label is the centre."""
    label = torch.randint(0, NUM_CLASSES, (num_points,))
    centres = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 1.8]])
    return TensorDataset(centres[label] + 0.6 * torch.randn(num_points, 2), label)


@torch.no_grad()
def evaluate(run: Run, model: nn.Module, loader: DataLoader) -> None:
    model.eval()
    num_samples, losses, leads = 0, [], []
    confusion = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.long, device=run.device)
    for batch in loader:
        for x, y in run.lanes(batch):
            scores = model(x)
            num_samples += len(x)
            confusion.index_put_((y, scores.argmax(1)), torch.ones_like(y), accumulate=True)
            losses.append(F.cross_entropy(scores, y, reduction="sum"))
            best, second = scores.topk(2).values.T
            leads.append(best - second)
    model.train()
    num_samples = run.total(num_samples)  # whole numbers are exact in any order
    confusion = run.total(confusion)
    loss = run.total(losses) / num_samples  # one number for each lane: they are added in the order of the lanes
    lead = torch.cat(run.gather(leads)).median()  # of every sample: a median is no sum
    run.print(f"samples {num_samples}  right {int(confusion.trace())}  loss {loss!r}  median lead {lead:.4f}")
    run.print(f"rows: true class, columns: answer  {confusion.tolist()}")


def main() -> None:
    run = lockstep.start(lanes=6)
    train_loader = run.shard(DataLoader(clouds(600), batch_size=60, shuffle=True))
    test_loader = run.shard(DataLoader(clouds(1003), batch_size=100))
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, NUM_CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.replicate(model, optimizer)

    for _ in run.epochs(3):
        for batch in train_loader:
            for x, y in run.lanes(batch):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        evaluate(run, model, test_loader)


if __name__ == "__main__":
    main()
